"""`qerl chat` as a function: a conversation with a model on our engine, its words as they come."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from qerl.engine.cache import blocks_that_fit
from qerl.engine.engine import Engine
from qerl.generate import BLOCK_SIZE, encode, load_tokenizer, stop_ids
from qerl.model.loader import architecture_in, load, require_base
from qerl.quant.checkpoint import resolve
from qerl.records import Request, Sampling


class Chat:
    """A conversation. The cache keeps what was said, so that a turn computes only what is new.

    A model without a chat template simply continues the text of all turns.
    """

    def __init__(
        self,
        model: str,
        base: str,
        adapter: Path | None = None,
        dtype: str | None = None,
        device: str | None = None,
        system: str | None = None,
        *,
        sampling: Sampling,
    ) -> None:
        require_base(base)
        folder = resolve(model, architecture_in)
        self.tokenizer = load_tokenizer(folder)
        decoder = load(model, base, device, dtype, adapter=adapter)
        self.context = decoder.arch.max_positions
        blocks = blocks_that_fit(decoder, BLOCK_SIZE, [self.context])
        self.engine = Engine(decoder, blocks, BLOCK_SIZE, tokenizer=self.tokenizer, lookahead=1, keep_prefixes=True)
        self.sampling = replace(sampling, stop_ids=stop_ids(folder, self.tokenizer))
        self.opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.opening)
        self.turns = 0

    def restart(self) -> None:
        """Forget what was said."""
        self.messages = list(self.opening)

    def say(self, text: str, on_text: Callable[[str], None]) -> str:
        """One turn: the answer, piece by piece to on_text and then whole. A Ctrl-C ends the answer early."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._encode(messages)
        tokens: list[int] = []
        shown = [""]

        def on_tokens(request: int, sample: int, new: list[int]) -> None:
            tokens.extend(new)
            whole = self.tokenizer.decode(tokens, skip_special_tokens=True)
            if not whole.endswith("\ufffd"):  # half a character: wait for the rest
                on_text(whole[len(shown[0]) :])
                shown[0] = whole

        self.turns += 1
        request = Request(self.turns, ids)
        stream = self.engine.stream([request], self.sampling, on_tokens)
        try:
            (completion,) = stream
        except KeyboardInterrupt:
            answer = shown[0]
        else:
            if completion.error:
                raise ValueError(f"{completion.error} Say it shorter, or start over with /new.")
            answer = completion.text
            on_text(answer[len(shown[0]) :])
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer

    def _encode(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        if self.tokenizer.chat_template:
            return encode(self.tokenizer, messages)
        return encode(self.tokenizer, "".join(message["content"] for message in messages))
