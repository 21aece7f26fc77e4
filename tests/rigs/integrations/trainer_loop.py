"""A BERT classifier by transformers' Trainer, with dropout, a schedule, a scalar of numpy's and rankup's callback. The
Trainer writes checkpoints of its own beside ours."""

import numpy as np
import torch
from transformers import Trainer, TrainingArguments

import rankup
from rankup.integrations.transformers import RankupCallback
from tests.rigs.foreign.bert_trainer import Tokens, small_bert


class OwnTrainer(Trainer):
    def log(self, logs, *more):
        super().log({**logs, "own": np.float64(0.5)}, *more)


def main():
    job = rankup.init(run="runs/trainer")
    args = TrainingArguments(
        output_dir="runs/trainer/own", num_train_epochs=3, per_device_train_batch_size=8, learning_rate=1e-3,
        use_cpu=True, ddp_backend="gloo", save_strategy="epoch", logging_steps=3, report_to=[], disable_tqdm=True,
    )
    trainer = OwnTrainer(model=small_bert(), args=args, train_dataset=Tokens(240))
    callback = RankupCallback(job, trainer)
    trainer.train(resume_from_checkpoint=callback.checkpoint())
    if trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), "trainer_loop.pt")
    job.finish()


if __name__ == "__main__":
    main()
