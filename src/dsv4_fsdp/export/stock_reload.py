"""Reload an export as a stranger would: stock Transformers, in a process of its own, nothing of this package imported.

Run by path, not as a module of the package: ``python -P stock_reload.py EXPORT REFERENCE PROMPT SEED DEVICE
THREADS``. In
REFERENCE, a safetensors file, are ``input_ids`` and the ``logits`` the trained model gave for them. Prints one JSON
object: ``equal``, ``max_abs_difference``, ``dtypes`` (number of tensors by dtype), ``loading`` (problems that
Transformers reports) and ``sample`` (PROMPT and text that continues it, empty if the logits differ or PROMPT is).

A quantised export is dequantised on loading, an adapter is put onto its base model by stock peft.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, FineGrainedFP8Config
from transformers.utils import logging

_NEW_TOKENS = 160
_TEMPERATURE = 0.7


def main(export: str, reference_path: str, prompt: str, seed: int, device: str, threads: int) -> None:
    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    adapter = Path(export, "adapter_config.json")
    base = json.loads(adapter.read_text())["base_model_name_or_path"] if adapter.exists() else export
    options: dict[str, Any] = {}
    if "quantization_config" in json.loads(Path(base, "config.json").read_text()):
        options["quantization_config"] = FineGrainedFP8Config(dequantize=True)
    model, loading = AutoModelForCausalLM.from_pretrained(base, output_loading_info=True, **options)
    if adapter.exists():
        from peft import PeftModel

        # peft widens bf16 adapters to fp32 unless told not to, and then computes something else than was trained.
        dtypes = {tensor.dtype for tensor in load_file(Path(export, "adapter_model.safetensors")).values()}
        widen = dtypes != {torch.bfloat16}
        model = PeftModel.from_pretrained(model, export, autocast_adapter_dtype=widen).eval()
    model.to(device)
    reference = load_file(reference_path)
    with torch.no_grad():
        logits = model(input_ids=reference["input_ids"].to(device)).logits.cpu()

    equal = torch.equal(logits, reference["logits"])
    sample = _sample(model, AutoTokenizer.from_pretrained(export), prompt, seed) if equal and prompt else ""
    print(
        json.dumps(
            {
                "equal": equal,
                "max_abs_difference": (logits.float() - reference["logits"].float()).abs().max().item(),
                "dtypes": Counter(str(tensor.dtype) for tensor in model.state_dict().values()),
                "loading": {kind: sorted(map(str, names)) for kind, names in loading.items() if names},
                "sample": sample,
            }
        )
    )


def _sample(model: Any, tokenizer: Any, prompt: str, seed: int) -> str:
    inputs = tokenizer((tokenizer.bos_token or "") + prompt, return_tensors="pt").to(model.device)
    torch.manual_seed(seed)
    generated = model.generate(
        **inputs,
        do_sample=True,
        temperature=_TEMPERATURE,
        max_new_tokens=_NEW_TOKENS,
        pad_token_id=tokenizer.eos_token_id,
    )
    text = tokenizer.decode(generated[0], skip_special_tokens=True)
    assert isinstance(text, str)
    return text


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5], int(sys.argv[6]))
