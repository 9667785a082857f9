"""Fine-tune a causal LM on packed documents with longmesh.hf.Trainer.

    longmesh run --ranks 2 examples/finetune_llama.py                          a tiny random model, a text made here
    longmesh run --ranks 2 examples/finetune_llama.py --model NAME --text FILE [--lora]

One line differs from a script for one process: where Trainer comes from. All ranks cut one sequence.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import transformers

from longmesh.hf import Trainer  # was: from transformers import Trainer

WORDS = [
    "a",
    "rank",
    "holds",
    "its",
    "part",
    "of",
    "every",
    "sequence",
    "and",
    "attention",
    "sees",
    "the",
    "whole",
    "of",
    "it",
]


def make_text(documents: int) -> list[str]:
    """Documents of different lengths, the same on every rank."""
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(5, 40))) for _ in range(documents)]


def tiny_model() -> Any:
    """A Llama of random weights, for bytes."""
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    return transformers.LlamaForCausalLM(config)


def load(options: argparse.Namespace) -> tuple[Any, list[dict[str, list[int]]]]:
    """The model, and its documents as token numbers."""
    texts = Path(options.text).read_text("utf-8").split("\n\n") if options.text else make_text(64)
    if options.model is None:
        return tiny_model(), [{"input_ids": list(text.encode())} for text in texts]
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model)
    return model, [{"input_ids": tokenizer(text)["input_ids"]} for text in texts if text.strip()]


def add_adapter(model: Any) -> Any:
    import peft

    return peft.get_peft_model(
        model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a causal LM over cut sequences.")
    parser.add_argument("--model", help="a checkpoint's name or folder; without it a tiny random model")
    parser.add_argument("--text", help="a file of documents, empty lines between them")
    parser.add_argument("--lora", action="store_true", help="train adapters only; needs peft")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--documents", type=int, default=8, help="documents packed into one sequence")
    parser.add_argument("--out", help="a folder for the trained model")
    return parser.parse_args()


def main() -> None:
    options = parse()
    model, rows = load(options)
    model = add_adapter(model) if options.lora else model
    args = transformers.TrainingArguments(
        options.out or tempfile.mkdtemp(),
        per_device_train_batch_size=options.documents,
        max_steps=options.steps,
        learning_rate=1e-3,
        logging_steps=max(1, options.steps // 4),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    packed = transformers.DataCollatorWithFlattening()
    trainer = Trainer(model, args, train_dataset=rows, data_collator=packed)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    if trainer.is_world_process_zero():
        print(f"loss {float(losses[0]):.3f} -> {float(losses[-1]):.3f} on {trainer.cp_size} ranks")
    if options.out:
        trainer.save_model(options.out)


if __name__ == "__main__":
    main()
