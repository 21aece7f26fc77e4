"""A BERT classifier with transformers' Trainer, which finds the other processes itself. The tokens are random."""

import argparse
import hashlib

import torch
import torch.distributed as dist
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed


class Tokens(torch.utils.data.Dataset):
    """Texts of 16 tokens. The label says whether the first token is from the first half of the vocabulary."""

    def __init__(self, size):
        self.ids = torch.randint(4, 100, (size, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        ids = self.ids[i]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": int(ids[0] < 52)}


def small_bert():
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16,
    )
    return BertForSequenceClassification(config)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--max-steps", type=int, default=6)
    args = parser.parse_args()
    training_args = TrainingArguments(
        output_dir=args.output_dir, max_steps=args.max_steps, per_device_train_batch_size=8, learning_rate=1e-3,
        use_cpu=True, ddp_backend="gloo", save_strategy="no", logging_steps=3, report_to=[], disable_tqdm=True,
    )
    set_seed(training_args.seed)
    model = small_bert()
    trainer = Trainer(model=model, args=training_args, train_dataset=Tokens(128))
    trainer.train()
    if trainer.is_world_process_zero():
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        print(f"Result: world size {training_args.world_size}, weights {hashlib.sha256(weights).hexdigest()[:16]}")
    if dist.is_initialized():
        dist.destroy_process_group()  # the Trainer does not, and gloo's threads may abort a process that ends with them


if __name__ == "__main__":
    main()
