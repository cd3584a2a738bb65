"""One training run, read top to bottom: config → data → model → optimise → evaluate → record.

    python train.py                       the default run, on this Python's own library
    python train.py --help                what can be set
"""

import gc
import json
import sys
from dataclasses import asdict
from math import inf, isfinite
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

import cli
from config import Config, UserError, config_yaml, read_config


@hydra.main(version_base="1.3", config_path="configs", config_name="config")
def main(cfg) -> float:
    """A job of Hydra's: check its configuration, train, and return what a sweeper minimises, the best validation loss."""
    job = HydraConfig.get()
    if cli.rank() and cfg.distributed == "auto" and cfg.dry_run is False:
        from training.follower import follow

        return follow()

    def run() -> float:
        return train(*cli.to_config(cfg, list(job.overrides.task)), job.runtime.choices.get("experiment") or "default")

    if job.mode == RunMode.MULTIRUN:
        import jobs

        return jobs.run_job(cfg, job, run)
    try:
        return run()
    except (UserError, OmegaConfBaseException) as e:
        cli.fail(cli.sentence(e))
    except BrokenPipeError:  # here too: Hydra would tell of it
        cli.output_closed()


def launch() -> None:
    """Run what is typed: one job, or those of a sweep."""
    if {"-m", "--multirun"} & set(sys.argv):
        import jobs

        jobs.run_sweep(main)
    else:
        main()


def train(config: Config, resume: bool, experiment: str) -> float:
    """Train as configured; return the best validation loss (nan where none was measured).

    Raises:
        UserError: something that the user can mend; nothing was lost.
        SystemExit: 130 or 143 after a stop signal, with a checkpoint saved.
    """
    # Imported here, so that a mistyped setting or --help need not wait for torch.
    if config.dry_run is not False:
        from training.plan import print_plan

        print_plan(config, experiment)
        return float("nan")
    from training.checkpoint import saved_steps
    from training.distributed import join
    from training.optim import NotFinite
    from training.record import RunFolder, Terminal, new_run_dir
    from training.runtime import enough_memory

    console = Terminal()
    with join(config) as team:
        run_dir = Path(config.run_dir) if config.run_dir else new_run_dir(experiment)
        folder = RunFolder(run_dir, new=not resume, made=not config.run_dir)
        try:
            with enough_memory(config):
                return _train(config, resume, experiment, run_dir, console, team)
        except NotFinite as e:
            again = ("the checkpoints are as they were: go on from the last one with resume=true"
                     if saved_steps(run_dir) else
                     "there is no checkpoint yet: start again with resume=auto")
            skip = ", or with on_nonfinite=skip" if config.on_nonfinite == "stop" else ""
            raise UserError(f"{e}; {again} and a lower optim.lr{skip}") from None
        except OSError as e:
            raise UserError(f"{e.filename or run_dir} cannot be read or written: {e.strerror or e}") from e
        finally:
            folder.release()


def _train(config: Config, resume: bool, experiment: str, run_dir: Path, console, team) -> float:
    import torch

    from attention_maps.ablation import importance
    from attention_maps.capture import capture
    from attention_maps.picture import draw, table_image
    from attention_maps.probe import make_probes
    from attention_maps.scores import births, named, score_heads
    from data.batches import Batches
    from data.tokens import prepare
    from decoding import sample_text
    from files import atomic_write
    from model import GPT
    from report.page import write_page
    from training import checkpoint, runtime
    from training.evaluate import Validation
    from training.optim import Watch, build_optimizers, load_optimizer_tensors, lr_factor, optimizer_tensors, rises_again, shares, update
    from training.record import CHANGES, Diary, Stopwatch, best_row, print_summary, proportions, quoted, read_rows, teller, with_best

    say = teller(console)
    team.settle(config)

    # What the run starts from: nothing, its own last checkpoint, or another run's model.
    folder, state, tokenizer, begin = None, {}, None, None
    if resume and not checkpoint.saved_steps(run_dir) and config.resume != "auto":
        raise UserError(f"run_dir={run_dir} was stopped before its first checkpoint: start it again with resume=auto")
    if resume and checkpoint.saved_steps(run_dir):
        folder, state = checkpoint.find_checkpoint(run_dir, "last", say)
    elif config.init_from:
        tokenizer, begin = checkpoint.starting_point(Path(config.init_from), say)
    if folder and config.init_from:
        tokenizer = checkpoint.tokenizer_of(folder, config.model.vocab_size)

    # The text, as tokens: for a run that goes on, the text that it began with.
    tokens = prepare(config.data, config.tokenizer, say, tokenizer)
    if folder:
        tokens = checkpoint.same_text(folder, state, tokens, config, say)
    T, vocab_size = config.model.block_size, tokens.tokenizer.vocab_size
    for split, ids in (("training", tokens.train), ("validation", tokens.val)):
        if len(ids) <= T:
            raise UserError(f"the {split} split has {len(ids)} tokens, too few for model.block_size={T}: "
                            "give more text, lower model.block_size"
                            + ", or take tokenizer=char" * (config.tokenizer.name != "char" and not config.init_from))
    padded = bool(config.init_from) and (config.model.vocab_size or 0) > vocab_size  # a model of others may have ids to spare
    if config.model.vocab_size not in (None, vocab_size) and not padded:
        raise UserError(f"model.vocab_size={config.model.vocab_size} is not the tokenizer's {vocab_size}: leave it out")
    config.model.vocab_size = config.model.vocab_size or vocab_size
    for line in tokens.summary():
        say(line)

    # The machine, the model, the optimizers.
    device, micro_batch, step_tokens = config.device, config.batch_size // config.accumulate // team.size, config.batch_size * T
    if folder:
        checkpoint.check_model(folder, config.model)
    runtime.check_memory(config)
    torch.manual_seed(config.seed)
    model = GPT(config.model).to(device)
    if begin:
        begin(model)
    optimizers = build_optimizers(model, config, team.divide(shares(model, config, team.size)))
    batches = Batches(tokens.train, T, config.batch_size, config.seed)
    validation = Validation(tokens.val[:config.data.val_max_tokens], tokens.tokenizer, T, device, config.precision, team)
    probes = make_probes(tokens.val, tokens.tokenizer, min(config.attention.tokens, T), config.seed)

    # Where the run stands: at its beginning, or at its last checkpoint.
    step, saved_at, tried_at, seconds, metrics, changes = 0, None, None, {}, {}, 0
    if folder:
        step, seconds, metrics = state["step"], state["seconds"], state["metrics"]
        changes = state["changes"] + (state["fingerprint"] != tokens.fingerprint)
        checkpoint.load_weights(model, folder / checkpoint.MODEL)
    team.order("start")  # the other processes build the same
    team.tell(json.dumps({"config": asdict(config), "tokenizer": tokens.tokenizer.to_json(), "fingerprint": tokens.fingerprint}).encode())
    team.share_weights(of_first=True)
    if folder:
        if config.eval_only:
            loss, bits = validation.evaluate(model)
            say(f"after {step:,} steps: validation loss {loss:.4f} nats per token, {bits:.4f} bits per byte")
            return loss
        rows = with_best(read_rows(run_dir / "metrics.jsonl"), state["best"])
        if step > config.max_steps or (step == config.max_steps and rows and rows[-1]["step"] == step):
            say(f"{run_dir} is finished: {step:,} steps are done, and max_steps={config.max_steps}; a larger max_steps extends it")
            best = best_row(rows)
            return best["val/loss"] if best else float("nan")
        team.order("load")
        load_optimizer_tensors(optimizers, model, team.hand_out(checkpoint.load_tensors(folder / checkpoint.OPTIMIZER)))
        checkpoint.discard_after(run_dir, step)
        saved_at = step
        say(f"going on after {step:,} steps")
        for line in rises_again(step, read_config(folder / checkpoint.CONFIG), config):
            say(line)
        before, now = state.get("machine", ""), runtime.rounding(config, team.size)
        if before not in ("", now):
            say(f"note: the last bits may differ from those of a run that was not stopped: it was saved on {before}, and this is {now}")

    # What runs a step: the model itself, or compiled.
    stopwatch = Stopwatch(lambda: runtime.synchronize(device), seconds)
    stopwatch.switch("train")
    forward, why = model, ""
    if config.compile == "auto":
        config.compile, why = runtime.compile_pays(device, model.flops_per_token() * step_tokens * (config.max_steps - step) / team.size)
    say(f"model    {model.num_parameters():,} parameters")
    epochs = config.max_steps * step_tokens / len(tokens.train)
    say(f"run      {config.max_steps:,} steps of {step_tokens:,} tokens, {epochs:.1f} epochs")
    for line in proportions(model.num_parameters(), len(tokens.train), epochs):
        say(line)
    say(f"machine  {f'{team.size} processes, each ' * (team.size > 1)}{runtime.describe(device)}, {config.precision}, "
        f"{'compiled' if config.compile else 'eager'}{why}")
    if config.compile:
        team.order("compile")
        x, y = (torch.from_numpy(part[:micro_batch]).to(device) for part in batches.batch(step))
        forward = runtime.compiled(model, x, y, config, say)
    with atomic_write(run_dir / "config.yaml") as part:  # first: what has one can be resumed
        part.write_text(config_yaml(config), encoding="utf-8")
    (run_dir / "attention").mkdir(exist_ok=True)
    stopwatch.switch(None)  # W&B takes its time to start

    with (team.stop as stop,
          Diary(run_dir, config, experiment, console, step, state.get("best")) as diary):
        best = checkpoint.restore_best(run_dir, diary.rows, changes)
        timed = (step, stopwatch.read())
        # An earlier version did not keep the best loss in its checkpoints.
        unknown = folder and state["best"] is None and (diary.damaged or best is None)
        kept = checkpoint.saved_steps(run_dir) if unknown else state.get("kept", [])
        mark = {CHANGES: changes} if changes else {}  # of which text the losses are
        watch = Watch(model, config, *state.get("skipped", ()))
        gc.freeze()  # what the imports made is not searched again at every collection

        def save(last: bool = False) -> None:
            """Save this step, if it is not yet; training goes on where that fails, unless this is the `last` chance."""
            nonlocal saved_at, tried_at
            if saved_at == step or (tried_at == step and not last):
                return
            tried_at = step
            watch.read()
            stopwatch.switch("save")
            team.order("gather")
            everyones = team.gather(optimizer_tensors(optimizers, model))
            try:
                checkpoint.save_checkpoint(
                    run_dir, step, model, everyones, tokens.tokenizer, config_yaml(config),
                    {"seconds": stopwatch.seconds, "fingerprint": tokens.fingerprint, "metrics": metrics,
                     "changes": changes, "best": best or {}, "kept": kept,
                     "skipped": [watch.skipped, watch.in_a_row], "machine": runtime.rounding(config, team.size)})
                saved_at = step
            except checkpoint.NotSaved as e:
                if last or step == config.max_steps:
                    raise
                diary.say(f"{e}; training goes on")

        def leave() -> None:
            save(last=True)
            diary.say(f"stopped after {step:,} steps; to go on: python train.py run_dir={quoted(run_dir)} resume=true")
            raise SystemExit(stop.exit_status)

        def look() -> tuple[dict, dict]:
            """Capture, keep, draw and score every head; the scores as metrics, and images of them. Holds no map afterwards."""
            stopwatch.switch("attention")
            snapshot, path = capture(model, probes, step), run_dir / "attention" / f"step_{step:08d}"
            scores = score_heads(snapshot)
            if step == config.max_steps:
                scores["importance"] = importance(model, *validation.excerpt(config.attention.ablation_tokens))
            images = {f"heads/{name}": table_image(table) for name, table in scores.items()}
            with diary.spared():
                snapshot.save(path.with_suffix(".npz"))
                for suffix in (".png", ".svg") if config.attention.svg else (".png",):
                    draw(snapshot, path.with_suffix(suffix), config.model.kv_heads, f"Attention after {step:,} steps")
                images["attention/map"] = path.with_suffix(".png")
            gc.collect()  # a figure's parts refer to each other: ten figures, of 5 to 10 MB each, would wait to be collected
            return named(scores), images

        def due(every: int) -> bool:
            return step == config.max_steps or (every > 0 and step % every == 0)

        while True:
            # What is due after `step` updates. A resumed run does what the stopped one did not come to record.
            if not diary.has(step):
                row, shown = dict(metrics), {}
                if step and due(config.checkpoint.every):
                    save()  # first, so that nothing that only looks at the run can cost it the step
                if due(config.eval.every):
                    stopwatch.switch("evaluate")
                    with stop.at_once(leave):
                        row["val/loss"], row["val/bits_per_byte"] = validation.evaluate(model)
                    if step and row["val/loss"] < (best["val/loss"] if best else inf):
                        save()
                        if saved_at == step:
                            best = {"step": step, "tokens": step * step_tokens, **row, **mark}
                            with diary.spared():
                                checkpoint.point(run_dir, "best", step)
                looks = due(config.attention.every)
                if looks:
                    with stop.at_once(leave):
                        heads, shown = look()
                        text = sample_text(model, tokens.tokenizer, config.attention.sample_tokens, config.seed)
                    row |= heads
                    row |= births([*diary.rows, {"step": step, **row}])
                    diary.sample(step, text)
                if row:
                    stopwatch.switch(None)
                    diary.write({"step": step, "tokens": step * step_tokens,
                                 "train_seconds": stopwatch.seconds["train"], **row, **mark,
                                 **{f"seconds/{kind}": s for kind, s in stopwatch.seconds.items() if kind != "train"}}, shown)
                if looks:
                    stopwatch.switch("attention")
                    with diary.spared():
                        diary.page(write_page(run_dir), last=step == config.max_steps)
                if saved_at == step:
                    checkpoint.prune(run_dir, config.checkpoint.keep, kept)
            if step == config.max_steps:
                break
            if stop.exit_status is not None:
                leave()
            if stop.save_asked:
                stop.save_asked = False
                save()
                diary.say(f"asked to save, and saved after {step:,} steps" if saved_at == step else "asked to save")

            stopwatch.switch("train")
            team.order("step", step)
            x, y = (torch.from_numpy(part) for part in batches.batch(step, team.rank, team.size))  # (batch_size / processes, T) each
            loss, grad_norm, finite = update(forward, model, optimizers, x, y, config, step, team)
            step += 1
            watch.note(step, finite)
            diary.advance(step)
            metrics = {}
            if due(config.log.every):
                trained = stopwatch.read()
                watch.read()
                metrics = {"train/loss": loss.item(), "train/lr": config.optim.lr * lr_factor(step - 1, config),
                           "train/grad_norm": grad_norm.item(),
                           "train/tokens_per_second": (step - timed[0]) * step_tokens / (trained - timed[1])}
                if config.on_nonfinite == "skip":
                    metrics = {key: value for key, value in metrics.items() if isfinite(value)} | {"train/skipped": watch.skipped}
                timed = (step, trained)
    print_summary(say, run_dir, diary.rows, stopwatch.seconds, validation.xz())
    return best["val/loss"] if best else float("nan")


if __name__ == "__main__":
    cli.start(launch, cli.train_help, cli.check_arguments)
