"""How much of packlora a run of one LoRA job and an accelerated step load, and that neither loads a plug-in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES_OF_TRAIN, LINES_OF_ACCELERATE = 33_750, 9_700
"""Most lines of packlora, comments and docstrings included. Lower them with what goes; never raise them."""
PLUGINS = ("packlora.megatron", "packlora.tune", "packlora.commands", "packlora.export", "packlora.generate")
COUNT = """
import json, sys
loaded = {name: module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "packlora"}
print(json.dumps({name: sum(1 for _ in open(path)) for name, path in loaded.items() if path}))
"""
MODEL = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, eos_token_id=1))
"""
TRAIN = f"""{MODEL}
import json, pathlib
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
folder = pathlib.Path(sys.argv[1])
model.save_pretrained(folder / "base")
words = {{word: number for number, word in enumerate(["<unk>", "</s>", *"abcdefgh"])}}
inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>").save_pretrained(folder / "base")
(folder / "rows.jsonl").write_text('{{"text": "a b c d"}}\\n{{"text": "e f g"}}\\n')
import packlora
result = packlora.train({{
    "base_model": str(folder / "base"), "output_dir": str(folder / "out"), "device": "cpu",
    "jobs": [{{"name": "a", "data": {{"path": str(folder / "rows.jsonl")}}, "adapter": {{"r": 2}},
              "train": {{"global_batch_size": 1}}}}],
}})
assert (folder / "out" / "a" / "adapter_model.safetensors").exists()
"""
ACCELERATE = f"""{MODEL}
from peft import LoraConfig, get_peft_model
import packlora
model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
packlora.accelerate(model)
tokens = torch.arange(8)[None]
model(input_ids=tokens, labels=tokens).loss.backward()
torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]).step()
"""


def loaded(code: str, *arguments: str) -> dict[str, int]:
    """Lines of each module of packlora that a process has loaded when the code is done."""
    done = subprocess.run([sys.executable, "-c", code + COUNT, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return lines


def test_a_run_of_one_job_loads_no_more_than_its_budget_and_no_plug_in(tmp_path: Path) -> None:
    lines = loaded(TRAIN, str(tmp_path))
    assert "packlora.adapters.linear" in lines and sum(lines.values()) <= LINES_OF_TRAIN
    assert not [name for name in lines if name.startswith(PLUGINS)]


def test_an_accelerated_step_loads_no_more_than_its_budget_and_no_plug_in() -> None:
    lines = loaded(ACCELERATE)
    assert "packlora.live.layers" in lines and sum(lines.values()) <= LINES_OF_ACCELERATE
    assert not [name for name in lines if name.startswith(PLUGINS)]
