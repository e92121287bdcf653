"""The engine on the CPU, judged by transformers.generate and by our own packed forward."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from qerl.engine.cache import block_bytes
from qerl.engine.engine import Engine
from qerl.model.decoder import Decoder
from qerl.model.loader import load
from qerl.model.noise import set_noise
from qerl.model.packing import next_tokens, pack
from qerl.records import Completion, Request, Sampling
from tests.model.test_adapter import shake
from tests.model.test_decoder import lora_model
from tests.model.variants import VARIANTS

PROMPTS = [(7, 9, 200, 13, 5), (1,), tuple(range(30, 51)), (7, 9, 200, 13, 5, 6, 77, 8)]
REQUESTS = [Request(i, prompt) for i, prompt in enumerate(PROMPTS)]


def model_of(make_checkpoint: Callable[..., Path], variant: str) -> tuple[Path, Decoder]:
    family, changes = VARIANTS[variant]
    folder = make_checkpoint(family, torch.float32, **changes)
    return folder, load(str(folder), base="bf16", device="cpu")


@pytest.mark.parametrize("variant", ["qwen2", "qwen2-sliding", "qwen3", "llama3-rope", "mistral-sliding"])
@pytest.mark.parametrize(("blocks", "overlap"), [(13, False), (200, False), (13, True)])
def test_greedy_output_equals_transformers_generate(
    make_checkpoint: Callable[..., Path], variant: str, blocks: int, overlap: bool
) -> None:
    folder, model = model_of(make_checkpoint, variant)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    stop = 5
    engine = Engine(model, num_blocks=blocks, block_size=4, token_budget=11, overlap=overlap)
    done = engine.generate(REQUESTS, Sampling(max_tokens=24, temperature=0, stop_ids=(stop,)))
    for prompt, completion in zip(PROMPTS, done, strict=True):
        out = theirs.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=24, eos_token_id=stop, pad_token_id=0
        )
        assert list(completion.token_ids) == out[0, len(prompt) :].tolist()
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == stop else "length")


def recomputed(model: Decoder, prompts: list[tuple[int, ...]], done: list[Completion], noise: bool, t: float) -> list:
    """Log-probs of the completions' tokens by the packed forward."""
    packed = pack([[*prompts[c.request], *c.token_ids] for c in done])
    places, targets = next_tokens(packed)
    with torch.no_grad():
        logp, _ = model.logprobs(model(packed, noise=noise)[places], targets, t)
    parts = logp.split([length - 1 for length in packed.lengths])
    return [part[len(prompts[c.request]) - 1 :] for part, c in zip(parts, done, strict=True)]


@pytest.mark.parametrize(("blocks", "overlap"), [(13, False), (300, False), (300, True)])
@pytest.mark.parametrize("base", ["bf16", "nvfp4"])
@pytest.mark.parametrize("noise", [False, True])
def test_behaviour_log_probs_equal_the_trainers(
    make_checkpoint: Callable[..., Path], tmp_path: Path, base: str, noise: bool, blocks: int, overlap: bool
) -> None:
    model = lora_model(make_checkpoint("qwen3"), base=base, device="cpu", cache_dir=tmp_path / "cache")
    set_noise(model, 0.05, torch.Generator().manual_seed(0))
    engine = Engine(model, num_blocks=blocks, block_size=4, token_budget=17 if overlap else 9, overlap=overlap)
    requests = [Request(i, prompt, samples=4) for i, prompt in enumerate(PROMPTS)]
    done = engine.generate(requests, Sampling(max_tokens=20, temperature=0.8, noise=noise))
    assert [(c.request, c.sample) for c in done] == [(r, s) for r in range(4) for s in range(4)]
    for ours, logp in zip(done, recomputed(model, PROMPTS, done, noise, 0.8), strict=True):
        assert torch.allclose(torch.tensor(ours.policy_logprobs), logp, atol=1e-5)
        assert ours.logprobs == ours.policy_logprobs
    assert len({c.token_ids for c in done}) == 16


def test_policy_log_probs_are_those_before_every_rule(make_checkpoint: Callable[..., Path]) -> None:
    _, model = model_of(make_checkpoint, "qwen2")
    rules = {"top_k": 50, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.5, "min_tokens": 9}
    sampling = Sampling(max_tokens=20, temperature=0.8, stop_ids=tuple(range(100)), **rules)
    done = Engine(model, num_blocks=300, block_size=4, lookahead=3).generate(REQUESTS, sampling)
    for ours, logp in zip(done, recomputed(model, PROMPTS, done, False, 0.8), strict=True):
        assert torch.allclose(torch.tensor(ours.policy_logprobs), logp, atol=1e-5)
        assert not torch.allclose(torch.tensor(ours.logprobs), logp, atol=1e-2)


@pytest.mark.parametrize("blocks", [13, 200])
def test_an_fp8_cache_is_near_the_exact_one(make_checkpoint: Callable[..., Path], blocks: int) -> None:
    _, model = model_of(make_checkpoint, "qwen2")
    sampling = Sampling(max_tokens=24, temperature=0)
    requests = [Request(i, prompt, samples=2) for i, prompt in enumerate(PROMPTS)]  # the last block is copied
    engine = Engine(model, num_blocks=blocks, block_size=4, token_budget=11, kv_cache_dtype="fp8")
    done = engine.generate(requests, sampling)
    assert engine.generate(requests, sampling) == done
    differences = [
        (torch.tensor(ours.policy_logprobs) - logp).abs()
        for ours, logp in zip(done, recomputed(model, PROMPTS, done, False, 1.0), strict=True)
    ]
    assert 1e-5 < torch.cat(differences).mean() < 0.02  # it is rounded, and no more than that
    assert [done[2 * i].token_ids for i in range(4)] == [done[2 * i + 1].token_ids for i in range(4)]


def test_an_fp8_cache_takes_half_the_memory_and_sleeps(make_checkpoint: Callable[..., Path]) -> None:
    _, model = model_of(make_checkpoint, "qwen2")
    arch = model.arch
    assert block_bytes(model, 16) == 2 * arch.layers * 16 * arch.kv_heads * arch.head_dim * 4
    assert block_bytes(model, 16, "fp8") == 2 * arch.layers * 16 * arch.kv_heads * (arch.head_dim + 4)
    engine = Engine(model, 20, 16, kv_cache_dtype="fp8_e4m3")
    held = engine.cache.both.nbytes + engine.cache.scales.nbytes
    assert held == 21 * block_bytes(model, 16, "fp8_e4m3")
    before = engine.generate(REQUESTS, Sampling(max_tokens=5))
    engine.sleep()
    engine.wake()
    assert engine.generate(REQUESTS, Sampling(max_tokens=5)) == before
    with pytest.raises(ValueError, match="no kv_cache_dtype 'fp4'; choose one of auto, fp8"):
        Engine(model, 20, kv_cache_dtype="fp4")


@pytest.mark.parametrize("rule", ["eos ids", "repetition_penalty", "min_tokens"])
def test_greedy_rules_are_those_of_transformers(make_checkpoint: Callable[..., Path], rule: str) -> None:
    folder, model = model_of(make_checkpoint, "qwen2")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    stops = tuple(range(0, 250, 2))
    ours, judge = {
        "eos ids": ({}, {}),
        "repetition_penalty": ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        "min_tokens": ({"min_tokens": 7}, {"min_new_tokens": 7}),
    }[rule]
    done = Engine(model, num_blocks=200, block_size=4).generate(
        REQUESTS, Sampling(max_tokens=24, temperature=0, stop_ids=stops, **ours)
    )
    assert rule == "min_tokens" or "stop" in {c.finish_reason for c in done}
    assert rule != "min_tokens" or min(len(c.token_ids) for c in done) >= 7
    for prompt, completion in zip(PROMPTS, done, strict=True):
        out = theirs.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=list(stops),
            pad_token_id=0,
            **judge,
        )
        assert list(completion.token_ids) == out[0, len(prompt) :].tolist()


def test_the_adapter_and_each_draw_of_noise_have_prefixes_of_their_own(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = lora_model(make_checkpoint("llama"), device="cpu", cache_dir=tmp_path / "cache")
    engine = Engine(model, num_blocks=100, block_size=2, keep_prefixes=True, max_running=1)
    greedy = Sampling(max_tokens=8, temperature=0, noise=True)
    for seed in (1, 2):
        set_noise(model, 0.3, torch.Generator().manual_seed(seed))
        done = engine.generate(REQUESTS, greedy)
        for ours, logp in zip(done, recomputed(model, PROMPTS, done, True, 1.0), strict=True):
            assert torch.allclose(torch.tensor(ours.policy_logprobs), logp, atol=1e-5)
    with model.adapter_disabled():
        done = engine.generate(REQUESTS, greedy)
        for ours, logp in zip(done, recomputed(model, PROMPTS, done, True, 1.0), strict=True):
            assert torch.allclose(torch.tensor(ours.policy_logprobs), logp, atol=1e-5)
    stream = engine.stream(REQUESTS, greedy)
    next(stream)
    with model.adapter_disabled(), pytest.raises(ValueError, match="adapter was switched"):
        next(stream)


def test_tokens_do_not_depend_on_the_batch_the_blocks_or_the_chunks(make_checkpoint: Callable[..., Path]) -> None:
    _, model = model_of(make_checkpoint, "llama")
    sampling = Sampling(max_tokens=15, temperature=1.0, top_p=0.9, top_k=50, seed=3)
    requests = [Request(i, prompt, samples=3) for i, prompt in enumerate(PROMPTS)]
    results = []
    settings = [(200, 4, 100, False), (10, 4, 7, False), (60, 16, 33, False), (40, 1, 1, False)]
    settings += [(200, 4, 100, True), (10, 4, 7, True), (60, 16, 33, True)]
    for blocks, size, budget, overlap in settings:
        done = Engine(model, blocks, size, budget, overlap=overlap).generate(requests, sampling)
        results.append([c.token_ids for c in done])
    assert all(result == results[0] for result in results)
    alone = Engine(model, 200, 4).generate([requests[2]], sampling)
    assert [c.token_ids for c in alone] == results[0][6:9]
    other = Engine(model, 200, 4).generate(requests, Sampling(max_tokens=15, top_p=0.9, top_k=50, seed=3, rollout=1))
    assert [c.token_ids for c in other] != results[0]


def test_an_update_reaches_the_sampler_without_a_copy(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = lora_model(make_checkpoint("llama"), device="cpu", cache_dir=tmp_path / "cache")
    engine = Engine(model, num_blocks=100, block_size=4)
    sampling = Sampling(max_tokens=12)
    before = engine.generate(REQUESTS, sampling)
    assert [c.token_ids for c in engine.generate(REQUESTS, sampling)] == [c.token_ids for c in before]
    shake(model, seed=11)
    engine.on_policy_update()
    after = engine.generate(REQUESTS, sampling)
    assert {c.policy_version for c in after} == {1}
    for ours, logp in zip(after, recomputed(model, PROMPTS, after, False, 1.0), strict=True):
        assert torch.allclose(torch.tensor(ours.policy_logprobs), logp, atol=1e-5)


def test_clean_calls_never_read_noisy_keys(make_checkpoint: Callable[..., Path]) -> None:
    _, model = model_of(make_checkpoint, "qwen2")
    engine = Engine(model, num_blocks=100, block_size=2, keep_prefixes=True)
    greedy = Sampling(max_tokens=8, temperature=0)
    clean = engine.generate(REQUESTS, greedy)
    set_noise(model, 0.3, torch.Generator().manual_seed(0))
    noisy = engine.generate(REQUESTS, Sampling(max_tokens=8, temperature=0, noise=True))
    assert [c.policy_logprobs for c in noisy] != [c.policy_logprobs for c in clean]
    again = engine.generate(REQUESTS, greedy)
    for a, b in zip(again, clean, strict=True):
        assert torch.allclose(torch.tensor(a.policy_logprobs), torch.tensor(b.policy_logprobs), atol=1e-5)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stream_that_is_left_gives_its_blocks_back(make_checkpoint: Callable[..., Path], overlap: bool) -> None:
    _, model = model_of(make_checkpoint, "qwen2")
    engine = Engine(model, num_blocks=100, block_size=4, overlap=overlap)
    stream = engine.stream([Request(0, (1, 2), samples=4), Request(1, (3,), 1)], Sampling(max_tokens=9))
    next(stream)
    stream.close()
    assert engine.pool.available == 100


def test_a_bad_request_is_refused_with_the_reason_and_harms_no_other(make_checkpoint: Callable[..., Path]) -> None:
    _, model = model_of(make_checkpoint, "qwen2")
    sampling = Sampling(max_tokens=9, min_tokens=5)
    (alone,) = Engine(model, num_blocks=10, block_size=4).generate([Request(5, (1, 2, 3))], sampling)
    engine = Engine(model, num_blocks=10, block_size=4)
    bad = {
        0: ((), "at least one token"),
        1: (tuple(range(128)), "model's context is 128"),
        2: (tuple(range(39)), "the cache has 40"),
        3: ((1, 10**6), "token ids outside 0 to"),
        4: (tuple(range(124)), "min_tokens is 5"),
    }
    requests = [Request(i, ids, samples=2) for i, (ids, _) in bad.items()]
    done = engine.generate([*requests, Request(5, (1, 2, 3))], sampling)
    assert [(c.request, c.sample) for c in done] == [(i, s) for i in bad for s in range(2)] + [(5, 0)]
    for completion in done[:-1]:
        assert completion.finish_reason == "refused"
        assert completion.token_ids == ()
        assert bad[completion.request][1] in completion.error
    assert done[-1].token_ids == alone.token_ids
    with pytest.raises(ValueError, match="the same id"):
        engine.generate([Request(0, (1,)), Request(0, (2,))], sampling)
    with pytest.raises(ValueError, match="0 samples; at least 1"):
        Request(0, (1,), samples=0)
    with pytest.raises(ValueError, match="at least 1"):
        Engine(model, num_blocks=10, max_running=0)
    for wrong in (
        {"temperature": -1},
        {"temperature": 1e-40},
        {"stop": ("",)},
        {"stop": "ab"},
        {"top_p": 0},
        {"min_p": 2},
        {"min_tokens": 10},
        {"top_k": -1},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Sampling(max_tokens=9, **wrong)
    with pytest.raises(ValueError, match="Stop ids"):
        engine.generate([Request(0, (1,))], Sampling(max_tokens=9, stop_ids=(10**6,)))


@pytest.mark.parametrize(
    ("lookahead", "overlap"), [(2, False), (5, False), (64, False), (1, True), (3, True), (5, True)]
)
def test_several_steps_between_looks_change_nothing(
    make_checkpoint: Callable[..., Path], lookahead: int, overlap: bool
) -> None:
    _, model = model_of(make_checkpoint, "qwen3")
    requests = [Request(i, prompt, samples=3) for i, prompt in enumerate(PROMPTS)]
    rules = {"min_tokens": 6, "stop_ids": tuple(range(0, 250, 9)), "repetition_penalty": 1.2, "top_p": 0.95}
    sampling = Sampling(max_tokens=21, seed=2, **rules)
    judge = Engine(model, num_blocks=200, block_size=4).generate(requests, sampling)
    assert {c.finish_reason for c in judge} == {"stop", "length"}
    for blocks in (14, 200):
        options = {"token_budget": 30, "lookahead": lookahead, "overlap": overlap}
        engine = Engine(model, num_blocks=blocks, block_size=4, **options)
        done = engine.generate(requests, sampling)
        assert engine.pool.available == blocks
        assert engine.generate(requests, sampling) == done  # bit for bit
        assert [(c.token_ids, c.finish_reason) for c in done] == [(c.token_ids, c.finish_reason) for c in judge]
        for ours, theirs in zip(done, judge, strict=True):
            assert len(ours.logprobs) == len(ours.token_ids)
            assert torch.allclose(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-5)


@pytest.mark.parametrize(("overlap", "call"), [(False, 9), (True, 9), (True, 10)])
def test_an_interrupt_returns_what_is_complete(make_checkpoint: Callable[..., Path], overlap: bool, call: int) -> None:
    _, model = model_of(make_checkpoint, "qwen2")
    engine = Engine(model, num_blocks=100, block_size=4, lookahead=2 if overlap else 1, overlap=overlap)
    requests = [Request(i, prompt, samples=2) for i, prompt in enumerate(PROMPTS)]
    whole = engine.generate(requests, Sampling(max_tokens=12, stop_ids=tuple(range(0, 250, 8))))
    real, calls = engine.runner.model.logits, []

    def interrupted(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(hidden)

    model.logits = interrupted  # type: ignore[method-assign]
    part = engine.generate(requests, Sampling(max_tokens=12, stop_ids=tuple(range(0, 250, 8))))
    assert 0 < len(part) < len(whole)
    assert all(completion in whole for completion in part)
    assert engine.pool.available == 100
    assert engine.generate(requests, Sampling(max_tokens=12, stop_ids=tuple(range(0, 250, 8)))) == whole


@pytest.mark.parametrize("overlap", [False, True])
def test_a_sleeping_engine_gives_its_memory_back_and_wakes(make_checkpoint: Callable[..., Path], overlap: bool) -> None:
    _, model = model_of(make_checkpoint, "qwen2")
    engine = Engine(model, num_blocks=100, block_size=4, overlap=overlap)
    before = engine.generate(REQUESTS, Sampling(max_tokens=12))
    engine.sleep()
    assert engine.cache.both.numel() == 0
    with pytest.raises(ValueError, match="sleeps: call wake"):
        engine.generate(REQUESTS, Sampling(max_tokens=12))
    engine.wake()
    assert engine.generate(REQUESTS, Sampling(max_tokens=12)) == before
    stream = engine.stream(REQUESTS, Sampling(max_tokens=12))
    next(stream)
    for second in (engine.sleep, lambda: engine.generate(REQUESTS, Sampling(max_tokens=2))):
        with pytest.raises(ValueError, match="stream"):
            second()


@pytest.mark.parametrize("overlap", [False, True])
def test_completions_name_the_noise_they_were_drawn_with(make_checkpoint: Callable[..., Path], overlap: bool) -> None:
    _, model = model_of(make_checkpoint, "qwen2")
    engine = Engine(model, num_blocks=100, block_size=4, max_running=1, overlap=overlap)
    seen = []
    for noise in (False, True, True):
        set_noise(model, 0.1, torch.Generator().manual_seed(0))
        seen += [c.noise_id for c in engine.generate(REQUESTS[:1], Sampling(max_tokens=2, noise=noise))]
    assert seen == [None, 2, 3]
    stream = engine.stream([Request(0, (1, 2)), Request(1, (3,) * 30)], Sampling(max_tokens=9, noise=True))
    next(stream)
    set_noise(model, 0.1, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="drawn anew"):
        next(stream)
    stream = engine.stream([Request(0, (1, 2)), Request(1, (3,) * 30)], Sampling(max_tokens=9))
    next(stream)
    with pytest.raises(ValueError, match="policy can't change"):
        engine.on_policy_update()


@pytest.mark.parametrize("overlap", [False, True])
def test_logits_that_are_not_numbers_raise(make_checkpoint: Callable[..., Path], overlap: bool) -> None:
    _, model = model_of(make_checkpoint, "qwen2")
    engine = Engine(model, num_blocks=100, block_size=4, overlap=overlap)
    before = engine.generate(REQUESTS, Sampling(max_tokens=12))
    kept = model.blocks[0].input_norm.weight_D.clone()
    model.blocks[0].input_norm.weight_D.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN logits"):
        engine.generate(REQUESTS, Sampling(max_tokens=12))
    model.blocks[0].input_norm.weight_D.copy_(kept)
    assert engine.generate(REQUESTS, Sampling(max_tokens=12)) == before  # nothing of it stays in the cache


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_string_ends_the_sample_and_its_text(
    make_checkpoint: Callable[..., Path], add_tokenizer: Callable[[Path], None], overlap: bool
) -> None:
    folder, model = model_of(make_checkpoint, "llama")
    add_tokenizer(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    engine = Engine(model, num_blocks=100, block_size=4, tokenizer=tokenizer, overlap=overlap)
    (free,) = engine.generate(REQUESTS[:1], Sampling(max_tokens=30, seed=1))
    stop = free.text[6:8]
    (stopped,) = engine.generate(REQUESTS[:1], Sampling(max_tokens=30, seed=1, stop=(stop,)))
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.find(stop)]
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    (later,) = engine.generate(REQUESTS[:1], Sampling(max_tokens=30, seed=1, stop=(stop,), min_tokens=25))
    assert len(later.token_ids) >= 25
    with pytest.raises(ValueError, match="need a tokenizer"):
        Engine(model, num_blocks=100).generate(REQUESTS[:1], Sampling(max_tokens=3, stop=("x",)))


@pytest.mark.parametrize("keep_prefixes", [False, True])
@pytest.mark.parametrize("running", [5, 16])
def test_overlap_changes_no_completion(make_checkpoint: Callable[..., Path], keep_prefixes: bool, running: int) -> None:
    """Sequences end unforeseen, others take their places and blocks, a second call finds what the first has left."""
    _, model = model_of(make_checkpoint, "qwen2")
    requests = [Request(i, prompt, samples=4) for i, prompt in enumerate(PROMPTS)]
    sampling = Sampling(max_tokens=30, stop_ids=tuple(range(0, 250, 12)), repetition_penalty=1.1, min_tokens=3)
    judge = Engine(model, num_blocks=200, block_size=4).generate(requests, sampling)
    assert {c.finish_reason for c in judge} == {"stop", "length"}
    options = {"max_running": running, "keep_prefixes": keep_prefixes, "lookahead": 3, "overlap": True}
    engine = Engine(model, num_blocks=60, block_size=4, **options)
    for _ in range(2):
        told: dict[tuple[int, int], list[int]] = {}

        def on_tokens(request: int, sample: int, new: list[int], told: dict = told) -> None:
            told.setdefault((request, sample), []).extend(new)

        done = sorted(engine.stream(requests, sampling, on_tokens), key=lambda c: (c.request, c.sample))
        assert [(c.token_ids, c.finish_reason) for c in done] == [(c.token_ids, c.finish_reason) for c in judge]
        for ours, theirs in zip(done, judge, strict=True):
            assert told[ours.request, ours.sample] == list(ours.token_ids)
            assert torch.allclose(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-5)
            assert torch.allclose(torch.tensor(ours.policy_logprobs), torch.tensor(theirs.policy_logprobs), atol=1e-5)
        assert engine.pool.available == 60


def test_with_overlap_rows_of_the_ended_do_not_run_out_of_the_table(make_checkpoint: Callable[..., Path]) -> None:
    """The longest ends at the model's context; the others go on for long in the rows they have."""
    _, model = model_of(make_checkpoint, "qwen2")
    requests = [Request(0, tuple(range(122))), *(Request(i, (i, 3)) for i in range(1, 6))]
    sampling = Sampling(max_tokens=70, seed=4)
    judge = Engine(model, num_blocks=200, block_size=4, lookahead=4).generate(requests, sampling)
    assert [len(c.token_ids) for c in judge] == [6, 70, 70, 70, 70, 70]
    done = Engine(model, num_blocks=200, block_size=4, lookahead=4, overlap=True).generate(requests, sampling)
    assert [c.token_ids for c in done] == [c.token_ids for c in judge]


def test_with_overlap_the_next_look_is_begun_before_the_last_is_read(make_checkpoint: Callable[..., Path]) -> None:
    _, model = model_of(make_checkpoint, "qwen2")
    real, begun = model.logits, []

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        begun.append(1)
        return real(hidden)

    model.logits = counted  # type: ignore[method-assign]
    for overlap, expected in ((False, [1, 4, 7, 10, 13]), (True, [1, 7, 10, 13, 13])):
        engine, looks = Engine(model, num_blocks=20, block_size=4, lookahead=3, overlap=overlap), []
        begun.clear()
        list(engine.stream(REQUESTS[:1], Sampling(max_tokens=13), lambda *_, at=looks: at.append(len(begun))))
        assert looks == expected  # forwards begun when tokens are told
