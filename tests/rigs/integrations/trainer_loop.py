"""A BERT classifier with transformers' Trainer, dropout, batch norm, random values of numpy, and rankup's callback. The
schedule follows the evaluation after each step. The Trainer also writes its own checkpoints. Rank 1 is slow. In
fp16 the scale of the loss grows until it skips steps."""

import os
import time

import numpy as np
import torch
from transformers import Trainer, TrainingArguments

import rankup
from rankup.integrations.transformers import RankupCallback
from rankup.observe import stragglers
from tests.rigs.foreign.bert_trainer import Tokens, small_bert


class OwnTrainer(Trainer):
    def training_step(self, *inputs):
        time.sleep(0.2 * (os.environ["RANK"] == "1" and self.state.global_step < 20))
        with torch.autocast("cpu", torch.float16):  # the Trainer's own fp16 needs a GPU
            return super().training_step(*inputs)

    def log(self, logs, *more):
        super().log({**logs, "own": np.float64(0.5), "more": np.ones(2)}, *more)


def main():
    stragglers.WINDOW_S, stragglers.ROW = 0.2, 3  # instead of 5 and 10
    job = rankup.init(run="runs/trainer", log_every_steps=2)
    args = TrainingArguments(
        output_dir="runs/trainer/own", num_train_epochs=3, per_device_train_batch_size=8, learning_rate=1e-3,
        use_cpu=True, ddp_backend="gloo", save_strategy="epoch", logging_steps=3, report_to=[], disable_tqdm=True,
        eval_strategy="steps", eval_steps=1, metric_for_best_model="constant", lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "factor": 0.9},
    )
    model = small_bert()
    model.classifier = torch.nn.Sequential(torch.nn.BatchNorm1d(model.config.hidden_size), model.classifier)
    trainer = OwnTrainer(model=model, args=args, train_dataset=Tokens(240), eval_dataset=Tokens(8),
                         compute_metrics=lambda _: {"constant": np.float32(1)})
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
    callback = RankupCallback(job, trainer)
    trainer.train(resume_from_checkpoint=callback.checkpoint())
    if trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), "trainer_loop.pt")


if __name__ == "__main__":
    main()
