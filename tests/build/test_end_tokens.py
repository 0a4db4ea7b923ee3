"""What the loss mask knows as the end of a turn ends generation, in the job and with its export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import GenerationConfig

from runner.build.components import build_device, build_model, build_tokenizer
from runner.build.data import build_data
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.inference.model_source import load_source, parse_source
from runner.launch.export import _loading_code
from tests.data.conftest import byte_tokenizer, chat
from tests.model.zoo import causal
from tests.parallelism.worlds import alone


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_base_model_that_learns_a_chat_template_stops_at_the_end_of_a_turn(adapter: str, workdir: Path) -> None:
    base, tokenizer = causal("llama").inner, byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    eos, end = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    base.generation_config.eos_token_id = base.config.eos_token_id = eos
    base.save_pretrained("base")
    tokenizer.save_pretrained("base")
    Path("rows.jsonl").write_text(json.dumps({"messages": chat("2+2?", "4")}) + "\n")
    words = ["algorithm=sft", "data=file", "data.path=rows.jsonl", "data.cache=false", "model=hf", "model.path=base"]
    spec, decide = compose_job([*words, f"adapter={adapter}"]).spec, Decisions()
    tokenizer = build_tokenizer(spec, decide)
    [item] = build_data(spec, tokenizer, decide).take(0, 1)
    learnt = [token for token, weight in zip(item.ids, item.weights, strict=True) if weight]
    assert learnt[-1] == end

    model = build_model(spec, tokenizer, build_device(spec, decide), decide, world=alone())
    assert model.limits().stop_token_ids == {eos, end}
    assert model.batch_decoder(decide=decide).stop_token_ids == {eos, end}
    assert any(str(d).startswith(f"generation_config.eos_token_id: [{end}, {eos}]") for d in decide.entries)
    model.save(Path("export"))
    assert GenerationConfig.from_pretrained("export").eos_token_id == [end, eos]
    assert ("model.generation_config = " in _loading_code(Path("export"), "AutoModelForCausalLM")) is (
        adapter == "lora"
    )
    served = load_source(parse_source("export", base="base" if adapter == "lora" else None)).model
    assert served.limits().stop_token_ids == {eos, end}
