"""What kind of loss goes backward: a sum where the line expects a mean, or a mean over a part.

Theory of operation. Workers' losses are averaged by their weights, which are their samples if the
script says nothing. A sum over the batch, or a mean over some of its targets, then trains for
something else, and differently with each number of workers. The terms of the loss, as its graph
shows them (`loss_terms`), tell in three ways.

*At once*: a sum that nothing divides, or a cross-entropy whose mean was not over all targets alike.

*By batches of other sizes*: a factor such as 0.001 may stand for one by the number of samples, or
for the weight of a term. If a batch of another size has a sum over as many more values, and the
same factor, it is a sum; a mean's factor would have changed. The values of a regulariser do not
change with the batch, and so it is neither.

*By batches of the same size*: a sum that is divided by now 37 and now 41, for 8 samples each, is a
mean over what counts in a batch, and so is a mean over now 37 and now 41 values.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch

from andon_trainer.averaging.readings import HostReader, PendingNumbers, Reader
from andon_trainer.script.loss_terms import Term, scale_of, scales_of, terms_of
from andon_trainer.script.script_checks import refuse_unknown_scaler

__all__ = ["LossCheck"]

log = logging.getLogger(__name__)

_LOSSES_CHECKED = 1000
"""Later losses are computed like these; those of another number of samples are looked at still."""
_MOST_SEARCHES = 16
"""For a scaler, among all objects of the process: each takes some ten milliseconds."""
_SIZES_KEPT = 8
_ALIKE = 1e-4
"""What numbers may differ by and still be the same, of their size."""
_UNCHANGED = 8
"""After so many batches with the same divisor it does not follow what counts in them."""


@dataclass(slots=True)
class _Seen:
    """What was seen of a term in batches of one number of samples."""

    values: int
    factor: float
    counted: float = 0.0
    """What it was divided by, or the mean of; 0: not seen yet."""
    times: int = 0
    """Batches in which the divisor was the same."""


@dataclass(frozen=True, slots=True)
class _Counted:
    """A term that is a mean over a count, without the graph that it came from."""

    term: tuple[object, ...]
    """What `_name_of` calls it."""
    samples: int
    sums: bool
    """Whether it is a sum over the batch, unless the count follows the samples."""
    whole: bool
    """Whether there is no other term."""
    meant: int = 0
    """How many values it is the mean of, if it is one that was divided by the part that counts."""


class LossCheck:
    """Warns, once, of a loss that is not the mean over samples that the line takes it for."""

    def __init__(self, reader: Reader | None = None) -> None:
        """Has seen no loss; `reader` brings what a graph holds on a GPU to the host."""
        self._reader = reader or HostReader()
        self._means: list[tuple[PendingNumbers, int]] = []
        """Of means over targets: what they were divided by, on its way, and their targets."""
        self._divisors: list[tuple[PendingNumbers, PendingNumbers | None, _Counted]] = []
        """What terms were divided by, and how many values of a sum count, on their way."""
        self._weights: list[tuple[PendingNumbers, bool]] = []
        """The sum of the weights of a weighted sum, on its way, and whether it is all of a loss."""
        self._factors: list[PendingNumbers] = []
        """What losses were multiplied by, perhaps by a GradScaler; on their way."""
        self._histories: dict[tuple[object, ...], dict[int, _Seen]] = {}
        """Of each term of the script's loss, by the number of samples."""
        self._left = self._left_for_others = _LOSSES_CHECKED
        self._samples = 0
        """Of the last loss."""
        self._searched: set[int] = set()
        """Where the factors lie that were looked for among the process's scalers."""
        self._left_for_scale = _LOSSES_CHECKED

    def look_for_scale(self, loss: torch.Tensor) -> None:
        """Looks for a GradScaler that has scaled the loss, and that the line does not know.

        What only looks like a scale is warned of.

        Raises:
            RuntimeError: there is one.
        """
        if self._left_for_scale <= 0:
            return
        self._left_for_scale -= 1
        for each in scales_of(loss):
            # A scale stays where it is; other factors may lie elsewhere in each loss.
            if each.data_ptr() not in self._searched and len(self._searched) < _MOST_SEARCHES:
                self._searched.add(each.data_ptr())
                refuse_unknown_scaler(each)
        factor = scale_of(loss)
        if factor is not None:
            self._factors.append(self._reader.begin(factor))
            if self._factors[-1].here:
                self._look_at_factors()

    def _look_at_factors(self) -> None:
        factors, self._factors = self._factors, []
        for scale in (factor.number() for factor in factors):
            if scale <= 1 or math.frexp(scale)[0] != 0.5 or self._left_for_scale < 0:
                continue
            self._left_for_scale = -1
            log.warning(
                "the loss was multiplied by %g before line.backward saw it, as by a GradScaler "
                "that was not prepared: line.loss, the journal and --loss-spike have the scaled "
                "one, and the first overflow halts the line. Pass the scaler with the optimizer: "
                "line.prepare(model, optimizer, scaler, loader)",
                scale,
            )

    def look(self, loss: torch.Tensor, samples: int) -> None:
        """Warns if a loss without a weight is a sum, or a mean over some targets only."""
        if not self._wants(samples):
            return
        terms = list(terms_of(loss))
        sums = [term for term in terms if self._is_sum(term, samples)]
        self._weigh_sums(sums, whole=len(sums) == len(terms))
        for term in terms:
            # Now, since backward frees what the graph has saved.
            if term.is_mean_over_targets:
                total = self._reader.begin(term.node._saved_total_weight)
                self._means.append((total, term.node._saved_target.numel()))
                continue
            divides = [each for each in term.divisors if each.numel() == 1]
            if not (term.summed or term.meant):
                continue
            plain = bool(divides) and _is_plain_sum(term, samples)
            name = _name_of(term)
            if term.meant:
                self._compare(_Counted(name, samples, plain, len(terms) == 1), float(term.meant))
                name = (*name, "part")
            counted = _Counted(name, samples, plain, len(terms) == 1, term.meant)
            mask = term.mask if plain else None
            counts = None if mask is None else self._reader.begin(mask.detach().sum())
            self._divisors += [(self._reader.begin(each), counts, counted) for each in divides]
        self._look_if_here()

    def collect(self) -> None:
        """Looks at the numbers that were on their way, and warns; may wait for them."""
        self._look_at_factors()
        weights, self._weights = self._weights, []
        for total, whole in weights:
            # Weights that add up to 1 make a mean of a sum.
            if abs(total.number() - 1) > 1e-3:
                self._warn_of_sum(whole=whole)
        means, self._means = self._means, []
        for total, targets in means:
            partly = _partly(total.number(), targets)
            if partly:
                self._warn_of_part(f"a mean over {partly}")
        divisors, self._divisors = self._divisors, []
        for divisor, counts, counted in divisors:
            number = divisor.number()
            if counted.meant:
                self._compare_part(counted, number)
            else:
                masked = counts is not None and _same(counts.number(), number)
                self._compare(counted, number, masked=masked)

    def _look_if_here(self) -> None:
        on_their_way = [reading for reading, _ in (*self._means, *self._weights)]
        for divisor, counts, _ in self._divisors:
            on_their_way += [divisor] if counts is None else [divisor, counts]
        if on_their_way and all(reading.here for reading in on_their_way):
            self.collect()

    def _wants(self, samples: int) -> bool:
        """Whether to look at a loss: not at all of a long run."""
        if self._left > 0:
            self._left -= 1
        elif self._left < 0 or samples == self._samples or self._left_for_others <= 0:
            return False
        else:
            self._left_for_others -= 1
        self._samples = samples
        return True

    def _is_sum(self, term: Term, samples: int) -> bool:
        """Whether a term is a sum over the batch: at once, or by batches of other sizes."""
        if not _is_over_the_batch(term, samples):
            return False
        if not term.divisors and _is_plain_sum(term, samples):
            return True
        return self._grows_with_the_batch(term, samples) and not term.is_of_parameters

    def _grows_with_the_batch(self, term: Term, samples: int) -> bool:
        """Whether batches of other sizes had as many more values, and the same factor."""
        sizes = self._histories.setdefault(_name_of(term), {})
        here, values = _seen(sizes, samples), term.summed
        here.values, here.factor = values, term.factor
        # A divisor may have been the same number twice by chance.
        needed = _UNCHANGED if term.divisors else 0
        return any(
            there.times >= needed
            and _same(there.values / size, values / samples)
            and _same(there.factor, term.factor)
            for size, there in sizes.items()
            if size not in (samples, 1) and there.values
        )

    def _compare_part(self, counted: _Counted, part: float) -> None:
        """Looks at a mean over all values that was divided by the part of them that counts."""
        count = part * counted.meant
        if abs(count - round(count)) <= _ALIKE * min(1, count) and part <= 1:
            self._compare(counted, round(count))
        else:  # It was scaled by something else, now and later.
            here = _seen(self._histories.setdefault(counted.term, {}), counted.samples)
            here.counted = math.nan

    def _compare(self, counted: _Counted, count: float, *, masked: bool = False) -> None:
        """Looks whether what a term is a mean over changes from batch to batch of one size.

        Args:
            counted: the term.
            count: what it is a mean over.
            masked: whether as many of its values count.
        """
        samples = counted.samples
        here = _seen(self._histories.setdefault(counted.term, {}), samples)
        before = here.counted
        if math.isnan(before):
            return
        here.counted = count
        if not before or _same(before, count):
            here.times += 1
            if not counted.sums or here.times != _UNCHANGED:
                return
            if not masked:
                self._warn_of_sum(whole=counted.whole)
            elif count % samples:
                self._warn_of_part(f"a mean over the {count:g} that count in {samples} samples")
            return
        here.times = 0
        # Padded to the longest of the batch: the values of all samples, alike.
        if samples < 2 or not (count % samples or before % samples):
            return
        self._warn_of_part(
            f"a mean over what counts in a batch: {before:g} in one and {count:g} in the next, of "
            f"{samples} samples each"
        )

    def _weigh_sums(self, sums: list[Term], *, whole: bool) -> None:
        """Warns of sums, if they are not weighted by what adds up to 1."""
        for term in sums:
            weights = term.weights
            if weights is None or weights.numel() != term.summed:
                self._warn_of_sum(whole=whole)
            else:
                total = self._reader.begin(weights.detach().sum())
                self._weights.append((total, whole))

    def _warn_of_sum(self, *, whole: bool) -> None:
        if whole:
            self._warn(
                "the loss is a sum over the batch (reduction='sum', or .sum()), and the line "
                "averages it as a mean: it trains for the sum divided by the number of workers "
                "and micro-batches. Give the mean: line.backward(loss / len(batch))"
            )
            return
        self._warn(
            "a part of the loss is a sum over the batch (reduction='sum', or .sum()), and the line "
            "averages it as a mean: that part is divided by the number of workers and "
            "micro-batches, and the others are not. Divide what is summed: "
            "line.backward(mean + summed / len(batch))"
        )

    def _warn_of_part(self, what: str) -> None:
        self._warn(
            f"the loss is {what}, and line.backward was given no weight: parts of a batch with few "
            "count as much as those with many. Write line.backward(loss, weight=...) with what the "
            "mean was taken over"
        )

    def _warn(self, text: str) -> None:
        if self._left >= 0:
            self._left = -1
            self._histories.clear()
            log.warning("%s; see docs/guide/losses.md", text)


def _name_of(term: Term) -> tuple[object, ...]:
    """The same for this term of every loss that the script computes."""
    return (term.name, *term.place)


def _is_over_the_batch(term: Term, samples: int) -> bool:
    """Whether a term is a sum that may have as many values of each sample."""
    if samples < 2 or term.unread:
        return False  # Of one sample sum and mean are the same.
    values = term.summed
    return values >= samples and not values % samples


def _is_plain_sum(term: Term, samples: int) -> bool:
    """Whether the factor of a sum over the batch is too large for a mean's."""
    if abs(term.factor) * samples <= 1 + _ALIKE or not _is_over_the_batch(term, samples):
        return False
    return not (term.is_shared_among(samples) or term.is_of_parameters)


def _seen(sizes: dict[int, _Seen], samples: int) -> _Seen:
    if samples not in sizes and len(sizes) == _SIZES_KEPT:
        sizes.pop(next(iter(sizes)))  # The oldest.
    return sizes.setdefault(samples, _Seen(0, 0.0))


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= _ALIKE * max(abs(one), abs(other))


def _partly(total: float, targets: int) -> str:
    """What a cross-entropy's mean was taken over, if not over all targets alike; else empty."""
    if _same(total, targets):
        return ""
    if total == int(total):
        return f"{int(total)} of {targets} targets"
    return f"targets of unequal weight ({total:.4g} for {targets})"
