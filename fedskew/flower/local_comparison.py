"""Compare, on a site's held-out samples, the federation's finished model with one that the site trains alone.

The result helps the site to decide whether to accept the model. Nothing leaves the site. The local model has the app's
architecture and settings, but is trained by the method `centralised`, without noise. In place of two heads, which only
some methods train, it has one linear head. It trains for `local_epochs` in each of the app's `rounds`. If the app has
`init`, the federation's model started from a file of weights. The local model starts from the same weights only if the
site gives this file, too (`--init`). Otherwise, it starts from random weights.

Both models are tested on the same samples, so the interval of the difference is for paired results. Neither model has
seen these samples, unless the site's data have changed since the federation's training: if the data have no test part
of their own, an added row can move samples from the training part to the test part. With one label per sample, a sample
counts +1 if only the federation's model is right, −1 if only the local model is right, and 0 otherwise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedskew.data.table_encoding import TableEncoding
from fedskew.engine import ModelState
from fedskew.errors import UserError, plural
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.preparation import positive_class, prepare
from fedskew.experiment.round.evaluate import Predictions
from fedskew.experiment.round.runtime import RuntimeFactory
from fedskew.experiment.run import run_prepared
from fedskew.flower.contract import Contract
from fedskew.flower.planning import read_app, require_app_code, resolve_config
from fedskew.flower.policy import Policy
from fedskew.flower.remote_scoring import read_finished_model, weights_file
from fedskew.flower.request_checks import require_known_code
from fedskew.flower.site_config import SiteConfig
from fedskew.flower.site_run import SiteRun
from fedskew.markdown import escape, percent, table
from fedskew.metrics.scores import Floats, Ints
from fedskew.metrics.site_scores import SiteScore, correct_shares, score_site
from fedskew.models.heads import TWO_HEADS

_QUANTILE = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""
MODEL_FILE = "model.json"
"""The description of an exported model, beside its weights."""


@dataclass(frozen=True)
class LocalComparison:
    """The results of a finished model and of a local one on the same held-out samples of a site."""

    site: str
    model: str
    sha256: str
    train_samples: int
    epochs: int
    finished: SiteScore
    local: SiteScore
    difference: float
    """Accuracy of the finished model minus that of the local one."""
    low: float
    high: float
    """`low` and `high` are the ends of the 95 % interval of the difference."""
    classes: tuple[tuple[str, int, float | None, float | None], ...]
    """For each class: name, number of held-out samples, and accuracy of both models. Empty for multi-label data."""
    is_federation_pretrained: bool = False
    """Whether the app has `init`."""
    is_local_pretrained: bool = False
    """Whether the local model started from the weights of `init`."""
    is_local_head_linear: bool = False
    """Whether the local model has one linear head in place of two heads, which only some methods train."""
    diverged: int = 0
    """The number of rounds of the local training that were discarded, because their numbers were not finite."""

    @property
    def verdict(self) -> str:
        """Say in one sentence which model is better."""
        interval = f"{100 * self.difference:+.1f} points, 95 % interval {100 * self.low:+.1f} to {100 * self.high:+.1f}"
        if self.low > 0:
            return f"On the data of {self.site}, the federation's model is better than the local one ({interval})."
        if self.high < 0:
            return f"On the data of {self.site}, the local model is better than the federation's ({interval})."
        return f"On the data of {self.site}, the two models do not differ significantly in accuracy ({interval})."

    @property
    def caveat(self) -> str | None:
        """Say why the comparison favours the federation's model. None if there is no such reason."""
        reasons = []
        if self.is_federation_pretrained and not self.is_local_pretrained:
            reasons.append(
                "The federation's model started from pretrained weights (init), and the local model from random ones, "
                "which favours the federation's. --init FILE, with the file of these weights, lets both start alike."
            )
        if self.diverged:
            reasons.append(
                f"The local training diverged in {plural(self.diverged, 'round')}, which did not change the local "
                "model. This favours the federation's."
            )
        return " ".join(reasons) or None


def compare_with_local(model: str, app: str, site: SiteConfig, init: str | None = None) -> LocalComparison:
    """Train a model on the site's training part, and test it and the finished model on the site's test part.

    `init` is the site's copy of the file of weights that the federation's model started from.
    """
    settings, contract, config = read_app(app)
    if init is not None and config.init is None:
        raise UserError(f"--init is {init!r}, but the app has no init; expected no --init")
    if site.name not in settings.sites:
        raise UserError(f"{site.name!r} is not a site of this federation; expected one of {', '.join(settings.sites)}")
    require_known_code(config, site)
    require_app_code(app, config)
    file = weights_file(model)
    contract = _complete(contract, file)
    resolved = resolve_config(replace(config, init=init), contract, settings.sites)
    finished = read_finished_model(str(file), contract, resolved)
    terms = {"contract": contract.to_json(), "config": resolved.to_mapping()}
    without_limits = replace(site, policy=Policy())  # a policy limits what a server may request
    run = SiteRun(without_limits, site.federation(contract), terms)
    tests = run.held(None).dataset.test
    if not len(tests):
        raise UserError(f"{site.name} has no test samples; expected a test part of its data")
    positive = positive_class(resolved, run.held(None).dataset)
    (local_probabilities, _), diverged = _train_alone(run, resolved, site.device)
    probabilities, true = run.runtime().test_set.predict(_on_device(run, finished.state))
    paired = correct_shares(probabilities, true) - correct_shares(local_probabilities, true)
    difference = float(paired.mean())
    # A single sample has no standard deviation. With a half-width of 1, its interval always includes 0.
    half_width = _QUANTILE * float(paired.std(ddof=1)) / math.sqrt(len(paired)) if len(paired) > 1 else 1.0
    return LocalComparison(
        site=site.name,
        model=str(file),
        sha256=finished.sha256,
        train_samples=int(run.held(None).sizes[0]),
        epochs=resolved.rounds * resolved.local_epochs,
        finished=score_site(probabilities, true, positive),
        local=score_site(local_probabilities, true, positive),
        difference=difference,
        low=difference - half_width,
        high=difference + half_width,
        classes=tuple(_by_class(contract.classes, probabilities, local_probabilities, true)),
        is_federation_pretrained=config.init is not None,
        is_local_pretrained=init is not None,
        is_local_head_linear=resolved.head in TWO_HEADS,
        diverged=diverged,
    )


def _complete(contract: Contract, weights: Path) -> Contract:
    """Complete the app's contract, if it is a draft, with the encoding from the exported model's description."""
    if not contract.column_sums:
        return contract
    try:
        described = json.loads((weights.parent / MODEL_FILE).read_text(encoding="utf-8"))
        return contract.complete(TableEncoding.from_json(described["inputs"]["encoding"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{weights.parent} has no {MODEL_FILE} with an encoding; expected an exported model") from error


def _train_alone(run: SiteRun, config: Config, device: str) -> tuple[Predictions, int]:
    """Train the app's model on the site's training part only.

    Return its predictions of the test part, and the number of rounds that diverged. The model stays at the site, so it
    needs no noise.
    """
    values = {"method": "centralised", "device": device, "engine": "plain", "clients_per_round": None}
    values |= {"example_clip": None, "example_noise": None, "head": "auto" if config.head in TWO_HEADS else config.head}
    alone = prepare(with_values(config, {**values, "eval_every": config.rounds}), run.held(None))
    result = run_prepared(alone)
    model = result.model
    state = ModelState(dict(model.named_parameters()), dict(model.named_buffers()))
    runtime = RuntimeFactory(alone.federation.dataset, alone.config, compile_steps=False).runtime(model, "plain")
    return runtime.test_set.predict(_on_device(run, state)), result.diverged


def _on_device(run: SiteRun, model: ModelState) -> ModelState:
    """Return the model without gradients, on the site's device."""
    parts = ({name: t.detach() for name, t in tensors.items()} for tensors in (model.params, model.buffers))
    return ModelState(*(run.on_device(part) for part in parts))


def _by_class(
    names: Sequence[str], finished: Floats, local: Floats, true: Ints
) -> list[tuple[str, int, float | None, float | None]]:
    """Return `LocalComparison.classes`."""
    if true.ndim > 1:
        return []
    found = []
    for number, name in enumerate(names):
        rows = true == number
        right = [float((p[rows].argmax(axis=1) == number).mean()) if rows.any() else None for p in (finished, local)]
        found.append((name, int(rows.sum()), right[0], right[1]))
    return found


def write_page(comparison: LocalComparison) -> str:
    """Return the result as a page in Markdown."""
    scores = [("the federation's", comparison.finished), ("local only", comparison.local)]
    rows = [
        (name, percent(s.accuracy), _number(s.auroc), _interval(s), _number(s.brier), _number(s.calibration_error))
        for name, s in scores
    ]
    pretrained = "the pretrained weights that the federation's model started from"
    start = pretrained if comparison.is_local_pretrained else "random weights"
    head = ", but with one linear head in place of two" if comparison.is_local_head_linear else ""
    classes = [(escape(name), count, percent(one), percent(other)) for name, count, one, other in comparison.classes]
    return "\n".join(
        [
            f"# {escape(comparison.site)}: the federation's model and a local one",
            "",
            escape(comparison.verdict),
            "",
            *([comparison.caveat, ""] if comparison.caveat else []),
            table(("model", "accuracy", "AUROC", "95 % interval", "Brier score", "calibration error"), rows),
            "",
            *([table(("class", "held-out samples", "the federation's", "local only"), classes), ""] if classes else []),
            f"Both models were tested on the same {comparison.finished.samples} held-out samples of this site, which "
            "neither has seen, unless this site's data have changed since the federation's training. "
            f"The local model was trained on this site's {comparison.train_samples} training samples "
            f"only, by the method `centralised`, without noise, from {start}, with the federation's architecture and "
            f"other settings{head}, for {plural(comparison.epochs, 'epoch')}. The interval of the difference is for "
            "paired results on these samples, and is unreliable for fewer than about 30 of them.",
            "",
            f"Model: `{comparison.model}`, SHA-256 `{comparison.sha256}`. Nothing left the site for this page.",
            "",
        ]
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _interval(score: SiteScore) -> str:
    return "–" if score.auroc_low is None else f"{score.auroc_low:.3f}–{score.auroc_high:.3f}"
