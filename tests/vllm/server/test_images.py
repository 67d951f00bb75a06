"""A model that sees images and reasons: requests, and items of jobs."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import socket
import threading

import cv2
import numpy as np
import pytest
from PIL import Image
from small_models import make_idefics, picture
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, VideoMediaIO
from vllm.multimodal.media.base import MediaWithBytes

from ballast_policy.request import RequestClass
from ballast_vllm.calls import CALL, Call
from ballast_vllm.internals import DataUrls, limit_media, num_bytes
from ballast_worker.errors import NotServed
from ballast_worker.openai import Caller
from ballast_worker.requests import RequestTiming

pytestmark = pytest.mark.timeout(900)

QUEUE = "test/images"
URL = "/v1/chat/completions"
END_OF_REASONING = 259
"""The token `</think>`."""


@pytest.fixture(scope="module")
def serving(start, tmp_path_factory, valkey):
    model = make_idefics(tmp_path_factory.mktemp("models") / "idefics")
    variables = {
        "BALLAST_RUNTIME_REDIS_URL": valkey.url,
        "BALLAST_OFFLINE_QUEUE": QUEUE,
        "BALLAST_MEDIA_MEBIBYTES": "64",
    }
    with start(model, "--reasoning-parser", "deepseek_r1", **variables) as found:
        yield found


def body(*parts, **more):
    """A greedy chat about text and images."""
    return {"messages": [{"role": "user", "content": [*parts]}], "max_tokens": 12, "temperature": 0, **more}


def text(words):
    return {"type": "text", "text": words}


def image(color):
    return {"type": "image_url", "image_url": {"url": picture(color)}}


BODIES = {
    "text": body(text("What is it?")),
    "red": body(text("What is it?"), image("red")),
    "blue": body(text("What is it?"), image("blue")),
    "two": body(image("red"), text("and"), image("blue")),
    "end of reasoning": body(text("What is it?"), image("red"), logit_bias={str(END_OF_REASONING): 100}),
}


@pytest.fixture(scope="module")
def online(serving):
    """The response to each body."""
    with serving.client() as client:
        return {name: client.post(URL, json={"model": "m", **body}).json() for name, body in BODIES.items()}


def test_an_image_decides_the_answer_and_is_counted_in_the_prompt(online):
    prompt = {name: found["usage"]["prompt_tokens"] for name, found in online.items()}
    answers = {name: found["choices"][0]["message"]["reasoning"] for name, found in online.items()}

    assert prompt["red"] == prompt["blue"] == prompt["text"] + 7 + 1  # 4 of the image, 3 around it, a line break
    assert len({answers[name] for name in ("text", "red", "blue", "two")}) == 4


def test_a_tenant_that_names_its_image_as_another_tenant_does_gets_its_own(serving, online):
    def ask(color, tenant):
        named = image(color) | {"uuid": "logo"}
        headers = {"x-llm-d-inference-fairness-id": tenant}
        with serving.client(headers=headers) as client:
            response = client.post(URL, json={"model": "m", **body(text("What is it?"), named)})
        return response.json()["choices"][0]["message"]["reasoning"]

    answers = {name: found["choices"][0]["message"]["reasoning"] for name, found in online.items()}

    assert ask("red", "lab") == answers["red"]
    assert ask("blue", "web") == answers["blue"]
    assert ask("blue", "lab") == answers["red"], "vLLM takes the name, not the image"


def test_no_url_of_a_client_or_of_an_item_is_opened(serving, run_job, as_line):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"HTTP://127.0.0.1:{listener.getsockname()[1]}/"
        bodies = [body({"type": "image_url", "image_url": {"url": found}}) for found in (url, "file:///etc/passwd")]
        with serving.client() as client:
            found = [client.post(URL, json={"model": "m", **sent}) for sent in bodies]
        result = run_job(QUEUE, [as_line("a", URL, **bodies[0])])["a"]
        with pytest.raises(BlockingIOError):
            listener.accept()

    messages = [response.json()["error"]["message"] for response in found]
    assert [response.status_code for response in found] == [400, 400]
    assert f"begins with '{url}', and this server opens data: URLs only" in messages[0]
    assert "start vLLM with --allowed-local-media-path" in messages[1]
    assert result.error["message"] == messages[0]


def test_what_would_hold_up_or_end_the_server_gets_400_and_fails_the_item(serving, run_job, as_line):
    large = {"type": "image_url", "image_url": {"url": data_url(2048, 2048)}}
    repetition = {"max_pattern_size": 10**9, "min_pattern_size": 8000, "min_count": 2}
    bodies = {"images": body(*[large] * 5), "repetition": body(text("What is it?"), repetition_detection=repetition)}
    with serving.client() as client:
        found = {name: client.post(URL, json={"model": "m", **sent}) for name, sent in bodies.items()}
    results = run_job(QUEUE, [as_line(name, URL, **sent) for name, sent in bodies.items()])

    assert {name: response.status_code for name, response in found.items()} == dict.fromkeys(bodies, 400)
    messages = {name: response.json()["error"]["message"] for name, response in found.items()}
    assert "take more than 64 MiB when they are decoded" in messages["images"]
    assert "repetition_detection asks for more than 512 tokens of a pattern" in messages["repetition"]
    assert {name: result.error["message"] for name, result in results.items()} == messages


@pytest.mark.parametrize(
    ("url", "options", "sentence"),
    [
        ("https://a.invalid/x", {"allowed_media_domains": ["b.invalid"]}, "one of the allowed domains"),
        ("https://a.invalid/x", {"allowed_local_media_path": "/tmp"}, "with --allowed-media-domains"),
        ("file:///etc/passwd", {"allowed_local_media_path": "/tmp"}, "must be a subpath"),
        ("file:///etc/passwd", {"allowed_media_domains": ["b.invalid"]}, "with --allowed-local-media-path"),
        ("FILE:///etc/passwd", {"allowed_media_domains": ["b.invalid"]}, "with --allowed-local-media-path"),
        ("/etc/passwd", {"allowed_local_media_path": "/tmp"}, "with --allowed-media-domains"),
    ],
)
def test_vllm_checks_the_urls_that_an_option_admits(url, options, sentence):
    with pytest.raises((ValueError, VLLMValidationError), match=sentence):
        DataUrls(**options).load_from_url(url, None)


def data_url(width, height):
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@pytest.fixture(autouse=True)
def no_call_stays():
    """End the call that a test began, which would be that of the tests that follow."""
    before = CALL.get()
    yield
    CALL.set(before)


def make_call(request_class=RequestClass.ONLINE):
    """Begin a call, to which all media that follow belong."""
    is_item = request_class is RequestClass.OFFLINE
    call = Call(Caller("lab", request_class, 0), RequestTiming(request_class, 0.0), is_item=is_item)
    CALL.set(call)
    return call


@pytest.mark.parametrize(("mebibytes", "num_read"), [("1", 4), ("0", 20)])
@pytest.mark.parametrize("request_class", RequestClass)
def test_images_of_one_call_are_decoded_up_to_a_limit_of_memory(monkeypatch, mebibytes, num_read, request_class):
    monkeypatch.setenv("BALLAST_MEDIA_MEBIBYTES", mebibytes)
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", str(256 * 256))

    async def load(*sizes):
        call, urls = make_call(request_class), DataUrls()
        loaded = (urls.fetch_image_async(data_url(*size)) for size in sizes)
        try:
            return await asyncio.gather(*loaded, return_exceptions=True)
        finally:
            call.leave_media()

    found = asyncio.run(load(*[(256, 256)] * 20))
    [large] = asyncio.run(load((257, 256)))
    refused = [image for image in found if isinstance(image, VLLMValidationError)]

    assert len(found) - len(refused) == num_read, "4 bytes for each pixel"
    assert all("raise BALLAST_MEDIA_MEBIBYTES" in str(error) for error in refused)
    assert "VLLM_MAX_IMAGE_PIXELS" in str(large)


def test_one_call_of_a_class_at_a_time_has_media_beyond_a_quarter_of_the_limit(monkeypatch):
    monkeypatch.setenv("BALLAST_MEDIA_MEBIBYTES", "1")
    calls, num_large = [], []

    async def load():
        call, urls = make_call(), DataUrls()
        calls.append(call)
        found = await asyncio.gather(*(urls.fetch_image_async(data_url(256, 256)) for _ in range(3)))
        num_large.append(sum(each.media.has_large_place for each in calls))
        call.leave_media()
        return len(found)

    async def load_all():
        return await asyncio.gather(*(load() for _ in range(9)))

    assert asyncio.run(load_all()) == [3] * 9
    assert num_large == [1] * 9


def avi(path, num_frames):
    video = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10, (256, 256))
    for _ in range(num_frames):
        video.write(np.zeros((256, 256, 3), np.uint8))
    video.release()
    return path.read_bytes()


@pytest.mark.parametrize(
    ("kind", "num_frames", "is_read"),
    [
        ("avi", 5, True),
        ("avi", 6, False),
        ("avi", 40, False),
        ("a file", 5, True),
        ("a file", 6, False),
        ("jpeg", 2, True),
        ("jpeg", 3, False),
        ("jpeg", 32, False),
    ],
)
def test_the_frames_of_a_video_are_counted_before_they_are_decoded(monkeypatch, tmp_path, kind, num_frames, is_read):
    """vLLM copies the frames of video/jpeg, so they count twice."""
    monkeypatch.setenv("BALLAST_MEDIA_MEBIBYTES", "1")
    path = tmp_path / "video.avi"
    content = base64.b64encode(avi(path, num_frames)).decode()
    frame = io.BytesIO()
    Image.new("RGB", (256, 256)).save(frame, "JPEG")
    frames = ",".join([base64.b64encode(frame.getvalue()).decode()] * num_frames)
    urls = {
        "avi": f"data:video/avi;base64,{content}",
        "a file": path.as_uri(),
        "jpeg": f"data:video/jpeg;base64,{frames}",
    }
    call, reader = make_call(), DataUrls(allowed_local_media_path=str(tmp_path))
    try:
        if is_read:
            assert num_bytes(asyncio.run(reader.fetch_video_async(urls[kind]))) == num_frames * 256 * 256 * 3
        else:
            with pytest.raises(VLLMValidationError, match=r"more than 1 MiB.* raise BALLAST_MEDIA_MEBIBYTES"):
                asyncio.run(reader.fetch_video_async(urls[kind]))
    finally:
        call.leave_media()

    assert call.media.num_bytes <= 2**20


def test_videos_that_vllm_reads_with_one_reader_count_once(monkeypatch, tmp_path):
    """On `/v1/systemone`, vLLM has one reader for all videos of a call."""
    monkeypatch.setenv("BALLAST_MEDIA_MEBIBYTES", "2")
    url = f"data:video/avi;base64,{base64.b64encode(avi(tmp_path / 'video.avi', 5)).decode()}"
    reader = VideoMediaIO(ImageMediaIO())
    image_io, video_loader = reader.image_io, reader.video_loader

    async def load():
        call, urls = make_call(), DataUrls()
        await asyncio.gather(*(urls.load_from_url_async(url, reader) for _ in range(2)))
        counted = call.media.num_bytes
        call.leave_media()
        return counted

    assert asyncio.run(load()) == 2 * 5 * 256 * 256 * 3
    assert (reader.image_io, reader.video_loader) == (image_io, video_loader)
    assert "load_bytes" not in vars(image_io)


class Waveforms(AudioMediaIO):
    """A reader of audio without the libraries that decode it."""

    num_decoding = most_decoding = 0

    def load_base64(self, media_type, data):
        """Return 400 KB in vLLM's form, after a time in which another thread could decode."""
        self.num_decoding += 1
        self.most_decoding = max(self.most_decoding, self.num_decoding)
        threading.Event().wait(0.01)
        self.num_decoding -= 1
        return np.zeros(100_000, np.float32), 16000


def test_audio_is_decoded_one_part_after_the_other_because_its_memory_is_known_afterwards(monkeypatch):
    monkeypatch.setenv("BALLAST_MEDIA_MEBIBYTES", "1")
    reader = Waveforms()

    async def load():
        call, urls = make_call(), DataUrls()
        try:
            loaded = (urls.load_from_url_async("data:audio/wav;base64,", reader) for _ in range(4))
            return await asyncio.gather(*loaded, return_exceptions=True)
        finally:
            call.leave_media()

    found = asyncio.run(load())

    assert [isinstance(audio, VLLMValidationError) for audio in found] == [False, False, True, True]
    assert reader.most_decoding == 1


def test_the_media_of_vllm_have_the_memory_of_their_content():
    frames, audio = np.zeros((2, 3, 4, 3), np.uint8), np.zeros(10, np.float32)

    assert num_bytes(MediaWithBytes((frames, {}), b"")) == 72
    assert num_bytes((audio, 16000)) == 40
    assert num_bytes(MediaWithBytes(Image.new("RGBA", (5, 2)), b"")) == 40


def test_the_reasoning_is_apart_from_the_answer(online):
    whole, ended = (online[name]["choices"][0]["message"] for name in ("red", "end of reasoning"))

    assert whole["reasoning"]
    assert whole["content"] is None
    assert not ended["reasoning"]


def test_an_item_with_images_has_the_answer_of_the_same_online_request(online, run_job, as_line):
    results = run_job(QUEUE, [as_line(name, URL, **body) for name, body in BODIES.items()])

    for name, expected in online.items():
        assert results[name].body["choices"] == expected["choices"], name
        assert results[name].tokens_in == expected["usage"]["prompt_tokens"], name


def test_vllm_follows_no_redirect_from_a_host_that_may_serve_media_and_reads_no_huge_image(monkeypatch):
    monkeypatch.delenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", raising=False)
    monkeypatch.delenv("VLLM_MAX_IMAGE_PIXELS", raising=False)
    limit_media()

    assert os.environ["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"
    assert os.environ["VLLM_MAX_IMAGE_PIXELS"] == "67108864"
    monkeypatch.setenv("BALLAST_MEDIA_MEBIBYTES", "1Gi")
    with pytest.raises(NotServed, match=r"BALLAST_MEDIA_MEBIBYTES is '1Gi'. Set a number of MiB, or 0"):
        limit_media()
