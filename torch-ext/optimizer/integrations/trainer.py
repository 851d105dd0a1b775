"""`trainer_metrics`: metrics of steps in the logs of transformers' Trainer (transformers 5.24)."""

from __future__ import annotations

import functools


def trainer_metrics(trainer: object, every: int = 50, per_parameter: bool = False) -> object:
    """A TrainerCallback that logs `Muon.metrics` by `trainer.log`, as every report_to of the
    arguments takes it: `trainer.add_callback(trainer_metrics(trainer))` before `train()`.

    The callback logs nothing if no step has collected metrics since the last log, as when a
    GradScaler has skipped all steps.

    trainer: transformers.Trainer or a subclass, with an optimizer of this package. every: number of
    steps from log to log. per_parameter: as of `metrics`. Raises ValueError for other values,
    ImportError without transformers, and at the first step TypeError for another optimizer.
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(
            f"every={every!r} is not allowed: it must be a number of steps, at least 1"
        )
    return _callback_class()(trainer, every, per_parameter)


def _unwrapped(optimizer: object) -> object:
    """The optimizer inside of wrappers such as accelerate's. Raises TypeError without metrics."""
    inner = optimizer
    while not hasattr(inner, "collect_metrics") and hasattr(inner, "optimizer"):
        inner = inner.optimizer
    if not hasattr(inner, "collect_metrics"):
        raise TypeError(
            f"trainer_metrics needs a Muon or NorMuon of this package, not "
            f"{type(inner).__name__}: pass optimizer_cls_and_kwargs=(MuonFactory, {{...}})"
        )
    return inner


@functools.cache
def _callback_class() -> type:
    """The class of the callback, a subclass of transformers'."""
    from transformers import TrainerCallback

    class MetricsCallback(TrainerCallback):
        """Collects in every step, and logs after each `every`-th."""

        def __init__(self, trainer: object, every: int, per_parameter: bool) -> None:
            self.trainer = trainer
            self.every = every
            self.per_parameter = per_parameter
            self.has_stepped = False  # since the last log
            self.hook = None

        def on_train_begin(
            self, args: object, state: object, control: object, **given: object
        ) -> None:
            """Let steps collect."""
            optimizer = _unwrapped(given["optimizer"])
            optimizer.collect_metrics = True
            self.on_train_end(args, state, control)
            self.hook = optimizer.register_step_post_hook(self._note_step)

        def on_train_end(
            self, args: object, state: object, control: object, **given: object
        ) -> None:
            """Let go of the optimizer."""
            if self.hook is not None:
                self.hook.remove()
            self.hook, self.has_stepped = None, False

        def on_step_end(
            self, args: object, state: object, control: object, **given: object
        ) -> None:
            """Log on all ranks: `metrics` is collective, and Trainer reports on one. A GradScaler
            may have left out all steps since the last log, alike on all ranks.
            """
            optimizer = _unwrapped(given["optimizer"])
            if state.global_step % self.every == 0 and self.has_stepped and optimizer._has_sums:
                self.has_stepped = False
                found = optimizer.metrics(per_parameter=self.per_parameter)
                self.trainer.log(found.as_dict())

        def _note_step(self, optimizer: object, args: tuple, kwargs: dict) -> None:
            """The optimizer's hook after each step."""
            self.has_stepped = True

    return MetricsCallback
