"""lm-eval's tasks on our decoder and engine: `qerl lm-eval run --model qerl --model_args pretrained=MODEL --tasks ...`.

lm-eval finds a model by its registered name once the module that registers it has been imported; it has no plug-in
entry points, so its own command can't know of `qerl`. `qerl lm-eval` is that command after this import; from Python,
import this module and call `lm_eval.simple_evaluate(model="qerl", ...)`. Noise is always off.
"""

import inspect
import logging
from collections.abc import Sequence
from typing import Any, Self

import torch
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import maybe_truncate, normalize_gen_kwargs
from tqdm import tqdm

from qerl.generate import engine_for, load_tokenizer, stop_ids
from qerl.integrations.continuations import Continuation, score_continuations
from qerl.model.loader import architecture_in, load
from qerl.quant.checkpoint import resolve
from qerl.records import Request, Sampling

# What a task may ask of generation; anything else would be ignored in silence.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
HANDLED = {*SAMPLING, "until", "max_gen_toks", "do_sample", "use_cache"}

DEVICE = "cuda:0"  # what lm-eval's command hands over where nobody named a device

log = logging.getLogger(__name__)


def run_command() -> None:
    """lm-eval's command, on the words in sys.argv."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


@register_model("qerl")
class QerlLM(TemplateLM):  # type: ignore[misc]
    """model_args: pretrained (folder or hub id), base, adapter (PEFT folder), dtype, device, max_length, max_gen_toks,
    add_bos_token, seed. batch_size is not needed: forwards are packed, and the engine fills its cache."""

    def __init__(
        self,
        pretrained: str,
        base: str = "nvfp4",
        adapter: str | None = None,
        dtype: str | None = None,
        device: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        seed: int = 0,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        folder = resolve(pretrained, architecture_in)
        self.tokenizer = load_tokenizer(folder)
        self.stop_ids = stop_ids(folder, self.tokenizer)
        self.model = load(pretrained, base, device, dtype, adapter=adapter)
        self.max_length = min(max_length or self.model.arch.max_positions, self.model.arch.max_positions)
        self.max_gen_toks, self.add_bos_token, self.seed = max_gen_toks, add_bos_token, seed
        self._device = self.model.device

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Self:
        return cls.create_from_arg_obj(utils.simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Self:
        """What model_args say goes before lm-eval's own `--device` and `--batch_size`, which are always there."""
        known = list(inspect.signature(cls).parameters)
        if odd := [key for key in arg_dict if key not in known]:
            raise ValueError(f"model_args has no {', '.join(odd)}; there are {', '.join(known)}.")
        if not arg_dict.get("pretrained"):
            raise ValueError("model_args must name the model: --model_args pretrained=FOLDER_OR_HUB_ID.")
        both = {**(additional_config or {}), **arg_dict}
        if both.get("device") == DEVICE and "device" not in arg_dict and not torch.cuda.is_available():
            log.warning("There is no GPU: computing on the CPU. (--device names a device.)")
            both["device"] = "cpu"
        return cls(**{key: value for key, value in both.items() if value is not None})

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context."""
        return self.eot_token_id if self.tokenizer.bos_token_id is None else int(self.tokenizer.bos_token_id)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """With the tokenizer's special tokens unless told otherwise; a text that begins with BOS gets no second one."""
        if add_special_tokens is None:
            add_special_tokens = self.add_bos_token
            if string.startswith(self.tokenizer.decode(self.prefix_token_id)):
                add_special_tokens = False
        settings = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **settings))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        asked = [Continuation.of(context, continuation, self.max_length) for _, context, continuation in requests]
        with tqdm(total=len(asked), disable=disable_tqdm, desc="loglikelihood") as bar:
            found = score_continuations(self.model, asked, bar.update)
        for (key, _, _), one in zip(requests, found, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, one)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Every token once, in windows of the whole context, as lm-eval cuts them."""
        totals = []
        for (text,) in (request.args for request in requests):
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pieces = [(None, *utils.make_disjoint_window(window)) for window in windows]
            totals.append(sum(logprob for logprob, _ in self._loglikelihood_tokens(pieces, disable_tqdm=True)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Requests of equal settings go through the engine together; the text ends before the first stop string."""
        texts = [""] * len(requests)
        groups: dict[Sampling, list[Request]] = {}
        for i, (context, settings) in enumerate(request.args for request in requests):
            sampling = self._sampling(settings)
            ids, _ = maybe_truncate(self.tok_encode(context), sampling.max_tokens, self.max_length, side="left")
            groups.setdefault(sampling, []).append(Request(i, tuple(ids)))
        with tqdm(total=len(requests), disable=disable_tqdm, desc="generate_until") as bar:
            for sampling, group in groups.items():
                lengths = [len(request.prompt_ids) for request in group]
                penalty = sampling.repetition_penalty != 1.0
                engine = engine_for(self.model, self.tokenizer, lengths, sampling.max_tokens, penalty=penalty)
                for done in engine.stream(group, sampling):
                    if done.error:
                        raise ValueError(f"lm-eval's request {done.request} can't be sampled: {done.error}")
                    texts[done.request] = done.text
                    self.cache_hook.add_partial("generate_until", requests[done.request].args, done.text)
                    bar.update()
        return texts

    def _sampling(self, settings: dict[str, Any]) -> Sampling:
        """A task's generation settings as ours. A stop string that is a special token stops by its id."""
        asked = normalize_gen_kwargs(settings, self.max_gen_toks)
        if odd := [key for key, value in asked.items() if key not in HANDLED and value is not None]:
            raise ValueError(f"The task asks for generation by {', '.join(odd)}, which qerl does not have.")
        if asked["max_gen_toks"] >= self.max_length:
            raise ValueError(
                f"The task asks for {asked['max_gen_toks']} new tokens and the context is {self.max_length}: ask for "
                "fewer (--gen_kwargs max_gen_toks=N)."
            )
        until = [text for text in asked["until"] if text]
        special = [text for text in until if text in self.tokenizer.all_special_tokens]
        stops = {*self.stop_ids, *(int(self.tokenizer.convert_tokens_to_ids(text)) for text in special)}
        chosen = {key: asked[key] for key in SAMPLING if asked.get(key) is not None}
        if not asked["do_sample"]:
            chosen = {"repetition_penalty": chosen.get("repetition_penalty", 1.0), "temperature": 0.0}
        return Sampling(
            max_tokens=asked["max_gen_toks"],
            stop=tuple(text for text in until if text not in special),
            stop_ids=tuple(sorted(stops)),
            seed=self.seed,
            **chosen,
        )
