"""The private members of vLLM that Ballast uses, and the points where a plan takes effect.

vLLM's `schedule()` builds the batch as always. Three points make it do what the plan states:

- `waiting` is a `PlanQueue`. During `schedule()` it holds only the requests that the plan admits, in the plan's order.
- `_reserve_prefill_lookahead` has the last word on the tokens of a request, both for running and for waiting requests.
  It returns at most the grant. For a running request without a grant it returns 0: vLLM then leaves the request out of
  the step and keeps its KV.
- `_try_schedule_encoder_inputs` sees the same tokens, so that vLLM encodes only the images of the grant.

A request without a grant keeps its KV, but not its place in the cache of encoded images, which may hold only one large
image: vLLM encodes an image again that another one replaced meanwhile.

`limit_media` replaces vLLM's reader of media in the API server, so that clients cannot make the server open their URLs,
or decode small files to more than its memory.
`limit_templates` replaces the function with which Jinja joins what a chat template writes.
`check_format` and `Formats` decide which library carries out structured output.
`limit_formats` replaces the functions with which vLLM's API server checks formats, because a check can end the process.

While drafts are off, `dynamic_sd_lookup`, vLLM's number of drafts by batch size, is 0 for each size. Then the drafter
proposes nothing. A draft model runs once in such a step, to keep its KV complete, instead of once for each draft.

`tests/vllm/test_contract.py` states what each private member must do.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from copy import copy
from dataclasses import replace
from functools import cache, cached_property, partial
from io import BytesIO
from threading import Thread, stack_size
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from PIL.Image import Image
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.image import open_image
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, ImageMediaIO, MediaConnector, VideoMediaIO
from vllm.sampling_params import check_json_nesting
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HiSparseHotSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import RequestStatus
from vllm.v1.serial_utils import MsgpackEncoder
from vllm.v1.structured_output import backend_guidance, backend_xgrammar
from vllm.v1.structured_output.backend_guidance import (
    GuidanceBackend,
    GuidanceGrammar,
    process_for_additional_properties,
    serialize_guidance_grammar,
)
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import get_structured_output_key

from ballast_api.pods import MEDIA_MEMORY
from ballast_openai.chat_limits import MOST_INDENTS, joined, num_indents
from ballast_policy.request import Request as Record
from ballast_vllm.block_tables import KvTable, KvTables
from ballast_vllm.daemon_threads import do
from ballast_vllm.format_trial import STACK_BYTES, Trials
from ballast_vllm.formats import (
    MOST_FORM,
    MOST_TEXT,
    SLOW,
    TOO_BIG,
    TOO_COSTLY,
    TOO_LONG,
    TOO_MANY_LEVELS,
    has_form,
    has_slow_format,
    longest_text,
    may_close,
)
from ballast_vllm.media import Media, NeedsLargePlace, most_bytes

ALLOCATED_AT_ONCE = CrossAttentionSpec, CircularBufferSpec, HiSparseHotSpec
"""Tables that get all blocks of a request at its admission."""
UNLIMITED = 1 << 30
MOST_PIXELS = 8192 * 8192
"""Pixels of an image or of a frame of a video, unless VLLM_MAX_IMAGE_PIXELS states another number."""
PIXEL_BYTES, FRAME_BYTES = 4, 3
"""Memory of a pixel. Pillow keeps RGB with a fourth byte, and vLLM the frames of a video in an array without it."""
CAPTURE_SIZE = 3, 4
"""OpenCV's numbers of the width and the height of a video."""
TOO_LARGE = (
    "The images and other media of the request take more than {} MiB when they are decoded. Send fewer or smaller "
    f"ones, or ask the administrator to raise {MEDIA_MEMORY}."
)
COMPLETE = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_REPETITION
YIELDING = frozenset({"ngram", "draft_model", "eagle", "eagle3"})
"""Drafters of the V1 model runner that accept 0 as the number of drafts. The others fail, so they keep their number.

Every drafter of the V2 model runner accepts 0. In vLLM 0.32, only the EAGLE and MTP families save time by it. The
others compute their usual drafts, which vLLM discards.
"""


class PlanQueue(RequestQueue):  # type: ignore[misc]
    """All waiting requests. While it is open, vLLM sees only the requests in `admissions`."""

    def __init__(self) -> None:
        self.all: dict[str, Any] = {}
        self.admissions: deque[Any] = deque()
        self.is_open = False

    def add_request(self, request: Any) -> None:
        self.all[request.request_id] = request

    def pop_request(self) -> Any:
        request = self.admissions.popleft()
        del self.all[request.request_id]
        return request

    def peek_request(self) -> Any:
        return self.admissions[0]

    prepend_request = add_request

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.all[request.request_id] = request

    def remove_request(self, request: Any) -> None:
        self.all.pop(request.request_id, None)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.all.pop(request.request_id, None)

    def __bool__(self) -> bool:
        return bool(self.admissions if self.is_open else self.all)

    def __len__(self) -> int:
        return len(self.all)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.all.values())


class PlannedBatch(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, restricted to the grants and admissions of a plan."""

    dynamic_sd_lookup: list[int] | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.waiting = self.plan_queue = PlanQueue()
        self.grants: Mapping[str, int] = {}
        self.uses_drafts = True
        self._draft_lookups = {True: self.dynamic_sd_lookup, False: self._lookup_without_drafts()}
        self._image_holders: Mapping[str, Any] = getattr(self.encoder_cache_manager, "request_cached_ids", {})
        """Requests with a place in the cache of encoded images. Models such as Whisper have no such cache."""
        self.most_residents = self.scheduler_config.max_num_seqs
        if not self.use_v2_model_runner:
            # The V1 model runner takes a parked request out of its batch. The V2 model runner keeps its row.
            self.most_residents = self.max_num_running_reqs = self.max_num_active_reqs = UNLIMITED

    def run_planned(self, grants: Mapping[str, int], admissions: Iterable[Any], *args: Any) -> Any:
        """Return vLLM's batch of the grants. The requests of `admissions` get their slots in this order."""
        queue = self.plan_queue
        self.grants = grants
        self.dynamic_sd_lookup = self._draft_lookups[self.uses_drafts]
        for request_id in [found for found in self._image_holders if found not in grants]:
            self.encoder_cache_manager.free(self.requests[request_id])
        queue.admissions.extend(admissions)
        queue.is_open = True
        try:
            return super().schedule(*args)
        finally:
            queue.is_open = False
            queue.admissions.clear()

    def preempt(self, request: Any, now: float) -> None:
        """Free the KV of a running request and let it wait again."""
        self.running.remove(request)
        self._preempt_request(request, now)

    def is_ready(self, request: Any) -> bool:
        """Return whether a waiting request can be admitted: its grammar is compiled."""
        return bool(request.status == RequestStatus.WAITING or self._handle_blocked_waiting_request(request))

    @staticmethod
    def is_running(request: Any) -> bool:
        """Return whether a request holds KV, running or parked."""
        return bool(request.status == RequestStatus.RUNNING)

    @staticmethod
    def is_complete(request: Any) -> bool:
        """Return whether a finished request has its whole answer."""
        return request.status in COMPLETE

    @staticmethod
    def adapter(request: Any) -> int:
        """Return the number of the LoRA adapter of a request; 0 without one."""
        return int(request.lora_request.lora_int_id) if request.lora_request else 0

    def fail(self, request: Any) -> None:
        """End a request with an error in the next call of `update_from_output`."""
        self.encoder_cache_mismatch_reqs.add(request.request_id)

    def _lookup_without_drafts(self) -> list[int] | None:
        drafter = self.vllm_config.speculative_config
        if drafter is None or not (self.use_v2_model_runner or drafter.method in YIELDING):
            return self.dynamic_sd_lookup
        return [0] * (self.scheduler_config.max_num_seqs + 1)

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        tokens = num_new_tokens
        if self.num_prefill_lookahead:
            tokens = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        return self._granted(request, num_computed_tokens, tokens)

    def _try_schedule_encoder_inputs(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        granted = self._granted(request, num_computed_tokens, num_new_tokens)
        return super()._try_schedule_encoder_inputs(request, num_computed_tokens, granted, *args, **kwargs)

    def _granted(self, request: Any, num_computed_tokens: int, tokens: int) -> int:
        """Return at most the grant of a request."""
        granted = self.grants.get(request.request_id, 0)
        if tokens <= granted:
            return tokens
        if granted and (self.uses_drafts or request.status != RequestStatus.RUNNING):
            # A request that computes all its known tokens may add drafts. vLLM pads an admission to that size.
            known = request.num_tokens + request.num_output_placeholders - num_computed_tokens
            if granted >= known:
                return tokens
        return granted

    def on_preempted(self, request: Any) -> None:
        """Note a preemption, of a plan or by vLLM itself."""

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self.on_preempted(request)


class KvBlocks:
    """vLLM's KV blocks, as the policy counts them.

    In a model with several kinds of layers, each kind has a block table. The policy counts the blocks of one table, and
    its share of the pool, which `mixed` computes if they differ. A model without KV counts as one with enough blocks.
    """

    def __init__(self, scheduler: Any) -> None:
        manager = scheduler.kv_cache_manager
        tables: Sequence[Any] = manager.coordinator.single_type_managers
        self._manager = manager
        self._has_cache = bool(manager.enable_caching and tables)
        self._pool = manager.block_pool
        self._num_tables: int = len(tables)
        self._pool_size: int = self._pool.num_gpu_blocks - 1  # one block is vLLM's null block
        self._is_encoder_decoder: bool = scheduler.is_encoder_decoder
        self.mixed: KvTables | None = None
        """The tables of a model whose tables need different numbers of blocks."""
        if tables:
            full = [table for table in tables if isinstance(table.kv_cache_spec, FullAttentionSpec)]
            table = min(full or tables, key=lambda found: found.block_size)
            self._index = tables.index(table)
            self.block_tokens: int = table.block_size
            self.smallest_block_tokens: int = min(found.block_size for found in tables)
            self.num_blocks: int = self._pool_size // len(tables)
            self.tables: Mapping[str, Sequence[Any]] = table.req_to_blocks
            if len(full) < len(tables) or len({found.block_size for found in tables}) > 1:
                self.mixed = _mixed(scheduler, tables, self.block_tokens)
                self.num_blocks = self.mixed.capacity(self._pool_size)
        else:
            self.block_tokens = self.smallest_block_tokens = 16
            self.num_blocks = -(-int(scheduler.max_model_len) // 16) * 2 * scheduler.scheduler_config.max_num_seqs
            self.tables = {}
        self.num_lookahead_tokens: int = scheduler.num_lookahead_tokens
        """Tokens beyond those of a step for which vLLM takes blocks: a draft model writes KV there."""
        self.num_shared_blocks = 0
        """Blocks at the start of a prompt that requests may share: the longest hit of a resident."""

    @property
    def num_free(self) -> int:
        """Blocks that no request uses, including cached blocks; with `mixed`, the same part of all blocks."""
        return self._share(self._pool.get_num_free_blocks()) if self._num_tables else self.num_blocks

    def _share(self, num_blocks: int) -> int:
        """Return blocks of the pool as the policy counts them."""
        if self.mixed is None:
            return num_blocks // self._num_tables
        return num_blocks * self.num_blocks // max(1, self._pool_size)

    @property
    def num_free_in_pool(self) -> int:
        """The same in blocks of the pool."""
        return int(self._pool.get_num_free_blocks())

    def held(self, request_id: str) -> int:
        """Return the blocks of a request."""
        return len(self.tables.get(request_id, ()))

    def shared(self, request_id: str) -> int:
        """Return the blocks of a request that other requests use, too."""
        blocks = self.tables.get(request_id, ())
        return int(sum([block.ref_cnt > 1 for block in blocks[: self.num_shared_blocks]]))

    def match_prefix(self, request: Any, record: Record) -> int:
        """Set the tokens of a waiting request that the prefix cache holds.

        Return the blocks of the pool that must be free so that vLLM admits the request; 0 if `mixed` is None.
        """
        found, num_tokens = None, 0
        if self._has_cache:
            found, num_tokens, _ = self._manager.get_computed_blocks(request)
            record.num_cached = num_tokens
            blocks = found.blocks[self._index]
            record.num_cached_idle = sum([block.ref_cnt == 0 for block in blocks]) if num_tokens else 0
        if self.mixed is None:
            return 0
        cost = self._cost(request, found, num_tokens)
        # vLLM shares the state of a Mamba layer one step after another request computed it.
        return cost if cost <= self._pool_size or not num_tokens else self._cost(request, None, 0)

    def _cost(self, request: Any, found: Any, num_cached: int) -> int:
        is_encoded = self._is_encoder_decoder and request.has_encoder_inputs
        num_encoder = (
            sum(request.get_num_encoder_embeds(i) for i in range(len(request.mm_features))) if is_encoded else 0
        )
        cost: int = self._manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=request.num_tokens,
            new_computed_blocks=(found or self._manager.empty_kv_cache_blocks).blocks,
            num_encoder_tokens=num_encoder,
            total_computed_tokens=num_cached,
            num_local_computed_tokens=num_cached,
            num_tokens_main_model=request.num_tokens,
            apply_admission_cap=True,
        )
        return cost

    @property
    def num_cached(self) -> int:
        """Blocks that only the prefix cache uses. The call reads every block."""
        if not self._num_tables:
            return 0
        return self._share(sum(block.ref_cnt == 0 and block.block_hash is not None for block in self._pool.blocks))


def _mixed(scheduler: Any, tables: Sequence[Any], block_tokens: int) -> KvTables:
    """Return the tables of a model that has several kinds of them."""
    config = scheduler.vllm_config
    most_in_flight: int = config.max_in_flight_tokens
    num_batches = most_in_flight // config.scheduler_config.max_num_batched_tokens
    per_decode = (1 + scheduler.num_spec_tokens + scheduler.num_lookahead_tokens) * num_batches
    kinds: dict[tuple[type, int, int | None], list[Any]] = {}
    for table in tables:
        spec = table.kv_cache_spec
        if not isinstance(spec, ALLOCATED_AT_ONCE):
            kinds.setdefault((type(spec), table.block_size, _window(spec)), []).append(table)
    found = []
    for (_, size, window), same in kinds.items():
        kind = KvTable(len(same), size, same[0].get_num_skipped_tokens)
        if window is not None:
            # A window may begin and end inside a block.
            most, most_in_prefill = [-(-(window - 1 + new) // size) + 1 for new in (per_decode, most_in_flight)]
            kind = replace(kind, grows_until=window, most=most, most_in_prefill=most_in_prefill)
        found.append(kind)
    return KvTables(found, block_tokens=block_tokens, num_tables=len(tables))


def _window(spec: Any) -> int | None:
    """Return the tokens that the next one reads in layers of a kind; None if it reads all."""
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window + spec.extra_retained_tokens)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(spec.attention_chunk_size)
    return 2 if isinstance(spec, MambaSpec) else None


def invalid_request(message: str, parameter: str | None) -> Exception:
    """Return the exception that vLLM answers with 400."""
    error: Exception = VLLMValidationError(message, parameter=parameter)
    return error


def encoded_bytes(value: object) -> int:
    """Return the size of parameters in a message to EngineCore; 0 if vLLM cannot send them, and refuses them."""
    try:
        return sum(memoryview(part).nbytes for part in MsgpackEncoder().encode(value))
    except (OverflowError, TypeError, ValueError):
        return 0


class DataUrls(MediaConnector):  # type: ignore[misc]
    """vLLM's reader of images and other media. It opens only data URLs, and those that an option of vLLM admits.

    Without `--allowed-media-domains`, vLLM would open any URL, also of hosts that only the pod can reach.
    """

    def load_from_url(self, url: str, *args: Any, **kwargs: Any) -> Any:
        """Return the content of a URL."""
        self._check(url)
        return super().load_from_url(url, *args, **kwargs)

    async def load_from_url_async(self, url: str, media_io: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the content of a URL. Data URLs are decoded for some calls at a time.

        vLLM would decode all of them before it counts their tokens.
        """
        from ballast_vllm.calls import CALL  # noqa: PLC0415 - EngineCore reads no media

        self._check(url)
        call = CALL.get()
        if call is None:
            return await super().load_from_url_async(url, media_io, *args, **kwargs)
        is_data = url[:5].lower() == "data:"
        counted = CountedMedium(call.media, media_io, needs_place=is_data)
        load = partial(super().load_from_url_async, url, counted.reader, *args, **kwargs)
        if not is_data:
            return await counted.decoded(load)
        async with nullcontext() if isinstance(media_io, ImageMediaIO) else call.media.turn:
            await call.take_media()
            with suppress(NeedsLargePlace):
                return await counted.decoded(load)
            counted.clear()
            await call.take_media(is_large=True)
            return await counted.decoded(load)

    def _check(self, url: str) -> None:
        start = url[:5].lower()
        is_file = start == "file:"
        if start == "data:" or (self.allowed_local_media_path if is_file else self.allowed_media_domains):
            return
        option = "--allowed-local-media-path" if is_file else "--allowed-media-domains"
        raise VLLMValidationError(
            f"The URL of a media part begins with {url[:40]!r}, and this server opens data: URLs only. Send the "
            f"content as a data: URL, or ask the administrator to start vLLM with {option}."
        )


class CountedMedium:
    """The memory of one image, video or audio of a call, counted before vLLM takes it if its header has the size."""

    def __init__(self, media: Media, reader: Any, *, needs_place: bool) -> None:
        """Let a copy of vLLM's reader count each image and each frame before it decodes it.

        On some routes, vLLM reads several media at a time with one reader.
        """
        self._media = media
        self._needs_place = needs_place
        self._num_bytes = 0
        self.reader = reader
        if isinstance(reader, ImageMediaIO):
            self.reader = self._counting_images(reader, PIXEL_BYTES)
        elif isinstance(reader, VideoMediaIO):
            self.reader = copy(reader)
            # vLLM copies all frames of video/jpeg to one array
            self.reader.image_io = self._counting_images(reader.image_io, 2 * FRAME_BYTES)
            self.reader.video_loader = self._counting(reader.video_loader)

    async def decoded(self, load: Callable[[], Awaitable[Any]]) -> Any:
        """Return what vLLM decodes.

        Raises:
            VLLMValidationError: the media of the call take too much memory.
            NeedsLargePlace: the call may have it after it takes a large place.
        """
        found = await load()
        self._add(max(0, num_bytes(found) - self._num_bytes))
        return found

    def clear(self) -> None:
        """Count nothing of the medium, because vLLM decodes it again."""
        self._media.take_back(self._num_bytes)
        self._num_bytes = 0

    def _add(self, number: int) -> None:
        if not self._media.add(number, needs_place=self._needs_place):
            raise VLLMValidationError(TOO_LARGE.format(most_bytes() // 2**20))
        self._num_bytes += number

    def _counting_images(self, reader: Any, pixel_bytes: int) -> Any:
        """Return a reader that counts each image."""
        load = reader.load_bytes

        def load_bytes(data: bytes) -> Any:
            with suppress(OSError):  # no image: vLLM refuses it with a sentence
                with open_image(BytesIO(data)) as image:  # reads only its header
                    width, height = image.size
                self._add(pixel_bytes * width * height)
            return load(data)

        counting = copy(reader)
        counting.load_bytes = load_bytes
        return counting

    def _counting(self, loader: Any) -> Any:
        """Return a loader of videos that counts the frames that it samples, if OpenCV decodes them."""
        add = self._add

        class CountingLoader(type(loader)):  # type: ignore[misc]
            @classmethod
            def read_frames(cls, video: Any, frames: Any, *args: Any, **kwargs: Any) -> Any:
                width, height = (int(video.get(number)) for number in CAPTURE_SIZE)
                num_copies = 2 if kwargs.get("frame_recovery") else 1
                add(num_copies * FRAME_BYTES * width * height * len(set(frames)))
                return super().read_frames(video, frames, *args, **kwargs)

        return CountingLoader()


def num_bytes(media: Any) -> int:
    """Return the memory of an image, of the frames of a video, or of audio, as vLLM has decoded it."""
    content = getattr(media, "media", media)
    if isinstance(content, Image):
        return PIXEL_BYTES * content.width * content.height
    return int(getattr(content[0] if isinstance(content, tuple) else content, "nbytes", 0))


def limit_media() -> None:
    """Let vLLM read media with `DataUrls` in this process, unless VLLM_MEDIA_CONNECTOR names another reader.

    Raises:
        NotServed: the variable of the memory of media is no number.
    """
    most_bytes()
    os.environ.setdefault("VLLM_MAX_IMAGE_PIXELS", str(MOST_PIXELS))  # read for each image, too
    # vLLM compares only the first URL with --allowed-media-domains, and would follow its redirect to any host. It reads
    # the variable for each URL.
    os.environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
    MEDIA_CONNECTOR_REGISTRY.register("http")(DataUrls)


def limit_templates(most: int) -> None:
    """Let chat templates write at most this number of characters in this process, those compiled already too.

    Jinja reads the function each time. It passes the parts of a text one by one, so no more of them are made.
    """
    ImmutableSandboxedEnvironment.concat = staticmethod(partial(joined, most=most))  # Python 3.14 binds a partial


class Guided(GuidanceGrammar):  # type: ignore[misc]
    """The format of one request. If it exceeds a limit of llguidance, the request fails."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Go on after tokens of the answer. Return whether they have the format."""
        # After an error, llguidance allows only the end of the answer, which then seems whole.
        return not self.ll_matcher.is_error() and bool(super().accept_tokens(request_id, tokens))


class Formats(StructuredOutputBackend):  # type: ignore[misc]
    """vLLM's backend for structured output, if its configuration states none: llguidance, which has limits.

    With XGrammar, a short grammar takes seconds of each step, and a short JSON schema minutes and gigabytes. Structural
    tags stay with XGrammar, because vLLM has no other reader of them. vLLM makes them of tools.
    """

    @cached_property
    def _guidance(self) -> Any:
        return GuidanceBackend(self.vllm_config, self.tokenizer, self.vocab_size)

    @cached_property
    def _xgrammar(self) -> Any:
        return XgrammarBackend(self.vllm_config, self.tokenizer, self.vocab_size)

    def compile_grammar(self, request_type: Any, grammar_spec: str, stop_token_ids: set[int] | None = None) -> Any:
        """Return the grammar of one request. vLLM calls it on several threads."""
        if request_type is StructuredOutputOptions.STRUCTURAL_TAG:
            return self._xgrammar.compile_grammar(request_type, grammar_spec, stop_token_ids)
        # GuidanceBackend keeps the text in a field for a moment, in which another thread may replace it.
        found = copy(self._guidance).compile_grammar(request_type, grammar_spec, stop_token_ids)
        return Guided(found.ll_matcher, found.ll_tokenizer, found.vocab_size)

    def allocate_token_bitmask(self, max_num_seqs: int) -> Any:
        """Return the masks of a batch, as wide as either library needs them."""
        return self._guidance.allocate_token_bitmask(max_num_seqs)

    def destroy(self) -> None:
        """Do nothing: neither library holds anything that must be freed."""


def take_formats(manager: Any) -> None:
    """Let vLLM's manager of structured output use `Formats`, unless the configuration states another backend.

    The API server has to check each request with `check_format`. Call it before the first request. The threads on
    which vLLM compiles a format get a larger stack, as all threads from now on.
    """
    stack_size(STACK_BYTES)
    config = manager.vllm_config
    tokenizer = getattr(manager, "tokenizer", None)  # missing with --skip-tokenizer-init
    if manager.backend is None and _is_open(config.structured_outputs_config, tokenizer):
        manager.backend = Formats(config, tokenizer, config.model_config.get_vocab_size())


def limit_formats() -> None:
    """Let vLLM refuse formats in this process whose check would take gigabytes, or overflow the stack.

    vLLM imports both functions each time. It calls that of XGrammar also on the event loop. All threads from now on get
    a larger stack.
    """
    stack_size(STACK_BYTES)
    for module, name, limited in (
        (backend_guidance, "validate_guidance_grammar", partial(_check_guidance, Trials())),
        (backend_xgrammar, "validate_xgrammar_grammar", _check_xgrammar),
    ):
        check = getattr(module, name)
        if not isinstance(check, partial):
            setattr(module, name, partial(limited, check))


def _check_guidance(trials: Trials, check: Callable[..., None], params: Any, tokenizer: Any = None) -> None:
    """Check a format with llguidance in a process that may die. With a tokenizer, call vLLM's own check as well."""
    try:
        grammar = serialize_guidance_grammar(*get_structured_output_key(params.structured_outputs))
    except (ValueError, KeyError, TypeError) as error:
        raise VLLMValidationError(f"Invalid grammar specification: {error}") from error
    found = trials.error(grammar)
    if found is None:
        raise VLLMValidationError(TOO_COSTLY, parameter="structured_outputs")
    if found:
        raise VLLMValidationError(f"Grammar error: {found}")
    if tokenizer is not None:
        _on_large_stack(partial(check, params, tokenizer))


def _check_xgrammar(check: Callable[..., None], params: Any) -> None:
    """Check a format with XGrammar on a large stack, if it is too short to overflow that.

    On the event loop, vLLM checks the structural tag of a body. That can take seconds, and `check_format` follows.
    """
    asked = params.structured_outputs
    schema = json.dumps(asked.json) if isinstance(asked.json, dict) else asked.json
    forms = [form for form in (schema, asked.structural_tag) if form is not None]
    if (size := sum(map(len, forms))) > MOST_FORM:
        raise VLLMValidationError(TOO_BIG.format(size), parameter="structured_outputs")
    longest = max(len(asked.regex or ""), len(asked.grammar or ""), *map(longest_text, forms))
    if longest > MOST_TEXT:
        raise VLLMValidationError(TOO_LONG.format(longest), parameter="structured_outputs")
    if asked.structural_tag is None or not _is_on_event_loop():
        _on_large_stack(partial(check, params))
    elif not has_form(asked.structural_tag):
        raise VLLMValidationError("Invalid structural tag specification.", parameter="structured_outputs")


def _is_on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _on_large_stack(work: Callable[[], None]) -> None:
    """Do the work on a new thread, because the stack of the event loop is small."""
    future: Future[None] = Future()
    Thread(target=do, args=(future, work), daemon=True).start()
    future.result()


def check_format(params: Any, model_config: Any, config: Any, tokenizer: Any) -> None:
    """Check the structured output of a request, as vLLM does, for the library that `Formats` uses.

    A schema is replaced by the one that `Formats` compiles, so that what passes the check also compiles. The call takes
    up to seconds, and lets other threads run.

    Raises:
        VLLMValidationError: the format is wrong or not supported.
    """
    if _is_open(config, tokenizer):
        # vLLM would let the first request choose the library of all requests.
        tag = params.structured_outputs.structural_tag
        if tag is None:
            config = replace(config, backend="guidance")
            _close_objects(params.structured_outputs)
        elif has_slow_format(tag):
            raise VLLMValidationError(SLOW, parameter="structured_outputs")
        else:  # after a refusal of XGrammar, vLLM would ask llguidance
            config = replace(config, backend="xgrammar")
    params._validate_structured_outputs(model_config, config, tokenizer)  # noqa: SLF001


def _close_objects(asked: Any) -> None:
    """Let the objects of a schema have only the properties that it names, as XGrammar does, if it keeps its meaning.

    Raises:
        VLLMValidationError: the schema is nested too deeply, or has too many levels in all.
    """
    check_json_nesting(asked.json)
    try:
        schema = json.loads(asked.json) if isinstance(asked.json, str) else asked.json
    except ValueError:
        return  # vLLM refuses it
    if num_indents(schema) > MOST_INDENTS:
        raise VLLMValidationError(TOO_MANY_LEVELS, parameter="structured_outputs")
    if isinstance(schema, dict) and may_close(schema):
        asked.json = process_for_additional_properties(schema)


def _is_open(config: Any, tokenizer: Any) -> bool:
    """Return whether the backend for structured output is for Ballast to choose, and llguidance is one."""
    return config.backend == "auto" and tokenizer is not None and _can_guide(tokenizer)


@cache
def _can_guide(tokenizer: Any) -> bool:
    """Return whether llguidance reads a tokenizer. The first call takes up to a second."""
    if not GuidanceBackend.is_tokenizer_supported(tokenizer):
        return False
    try:
        GuidanceBackend._build_ll_tokenizer(tokenizer, 0)  # noqa: SLF001
    except ValueError:  # such as that of BERT
        return False
    return True


def image_places(request: Any) -> list[range]:
    """Return the places of images, or other media, among the tokens of a request."""
    places = [feature.mm_position for feature in request.mm_features]
    return [range(place.offset, place.offset + place.length) for place in places]


def add_utility(name: str, call: Callable[..., Any]) -> None:
    """Add a method to EngineCore. A client calls it by its name, and it runs between two steps."""
    setattr(EngineCore, name, call)
