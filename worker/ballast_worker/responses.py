"""Responses in OpenAI's formats: whole objects, stream chunks, usage."""

from __future__ import annotations

from dataclasses import dataclass, field

from ballast_engine.request import FinishReason, Output
from ballast_worker.errors import Refused
from ballast_worker.http_exchange import compact, event

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"


@dataclass(slots=True)
class AnswerBuffer:
    """The outputs of one request so far."""

    num_prompt: int = 0
    num_output: int = 0
    num_cached: int = 0
    finish_reason: FinishReason | None = None
    error: str = ""
    parts: list[str] = field(default_factory=list)

    def add(self, output: Output) -> None:
        """Add the output of one step."""
        self.num_prompt = output.num_prompt or self.num_prompt
        self.num_output = output.num_output or self.num_output
        self.num_cached = output.num_cached or self.num_cached
        self.finish_reason = output.finish_reason
        self.error = output.error
        if output.text:
            self.parts.append(output.text)

    @property
    def is_over(self) -> bool:
        """Whether the last output was added."""
        return self.finish_reason is not None

    def take_text(self) -> str:
        """Return the text since the last call."""
        text = "".join(self.parts)
        self.parts.clear()
        return text

    @property
    def usage(self) -> dict[str, object]:
        """OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_output,
            "total_tokens": self.num_prompt + self.num_output,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }

    def check(self) -> None:
        """Raise `Refused` if the request ended without an answer."""
        if self.finish_reason is FinishReason.FAILED:
            raise Refused(500, self.error, code="engine_failed", kind="server_error")
        if self.finish_reason in {FinishReason.ABORTED, FinishReason.GIVEN_BACK}:
            raise stopping()


def stopping() -> Refused:
    """Return the error of a worker that drains."""
    return Refused(
        503,
        "This worker is shutting down. Send the request again: another worker answers it.",
        code="draining",
        kind="server_error",
        headers={"retry-after": "1", "connection": "close"},
    )


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The format of the response to one request. `id` is that of the response, such as `chatcmpl-1f2e`."""

    is_chat: bool
    id: str
    created: int
    model: str
    include_usage: bool = False

    def whole(self, answer: AnswerBuffer) -> dict[str, object]:
        """Return the answer as one object. This takes the text out of `answer`."""
        choice: dict[str, object] = {"index": 0}
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": answer.take_text(), "refusal": None}
        else:
            choice["text"] = answer.take_text()
        choice["logprobs"] = None
        choice["finish_reason"] = answer.finish_reason
        return {**self._head("chat.completion"), "choices": [choice], "usage": answer.usage}

    def first(self) -> bytes:
        """Return the start of a stream: the role in a chat."""
        return self._chunk({"role": "assistant", "content": ""}) if self.is_chat else b""

    def delta(self, text: str, finish_reason: FinishReason | None = None) -> bytes:
        """Return chunks for new text, the end, or both. The end of a chat is a separate chunk."""
        if not self.is_chat:
            return self._chunk(text, finish_reason) if text or finish_reason else b""
        chunk = self._chunk({"content": text}) if text else b""
        return chunk + self._chunk({}, finish_reason) if finish_reason else chunk

    def last(self, answer: AnswerBuffer) -> bytes:
        """Return the end of a stream."""
        if not self.include_usage:
            return DONE
        return event({**self._head("chat.completion.chunk"), "choices": [], "usage": answer.usage}) + DONE

    def _head(self, chat_object: str) -> dict[str, object]:
        name = chat_object if self.is_chat else "text_completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}

    def _chunk(self, content: object, finish_reason: FinishReason | None = None) -> bytes:
        choice = {
            "index": 0,
            "delta" if self.is_chat else "text": content,
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        data = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self.include_usage:
            data["usage"] = None
        return event(data)


def error_event(refused: Refused) -> bytes:
    """Return an error as an event of a stream that has started."""
    return b"data: " + refused.as_openai() + b"\n\n"


def model_card(name: str, root: str, created: int, max_model_len: int) -> dict[str, object]:
    """Return OpenAI's `model` object for a name of the model `root`, with `max_model_len` as in vLLM."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "ballast",
        "root": root,
        "parent": None,
        "max_model_len": max_model_len,
    }


def model_list(*cards: dict[str, object]) -> bytes:
    """Return the response of `/v1/models`."""
    return compact({"object": "list", "data": cards})
