"""A BERT classifier by transformers' Trainer, with dropout, a schedule and rankup's callback."""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import rankup
from rankup.integrations.transformers import RankupCallback


class Tokens(torch.utils.data.Dataset):
    def __init__(self, size):
        self.ids = torch.randint(4, 100, (size, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": int(self.ids[i][0] < 52)}


def main():
    job = rankup.init(run="runs/trainer")
    args = TrainingArguments(
        output_dir="runs/trainer/own", num_train_epochs=3, per_device_train_batch_size=8, learning_rate=1e-3,
        use_cpu=True, ddp_backend="gloo", save_strategy="no", logging_steps=3, report_to=[], disable_tqdm=True,
    )
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16,
    )
    trainer = Trainer(model=BertForSequenceClassification(config), args=args, train_dataset=Tokens(240))
    callback = RankupCallback(job, trainer)
    trainer.train(resume_from_checkpoint=callback.checkpoint())
    if trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), "trainer_loop.pt")
    job.finish()


if __name__ == "__main__":
    main()
