"""How a report comes to what it says: its last section."""

from __future__ import annotations

from study.analysis.allowance import EQUAL
from study.analysis.timing import EARLY
from study.records.runs import BASELINE
from study.report.sentences import CANNOT_TELL

METHOD = f"""## Method

- Losses are mean nats a token on fixed validation windows; perplexity is exp(loss). Means, intervals and differences
  are made of losses, so a difference is the logarithm of a ratio of perplexities.
- "final" is the last step; "best" is the lowest of a run's evaluations, which flatters every run alike.
- Differences to {BASELINE} are paired by seed: both runs saw the same batches in the same order from the same initial
  weights. Their intervals are Student's t over seeds, one by one, not adjusted for the number of variants.
- The noise floor pools the equivalent arms within each seed: S(k-1) degrees of freedom for S seeds of k arms.
  Arms whose losses agree to the last bit are one arm (on two layers RALATE is RAALT), counted once. A
  variant that is a real change is compared with the mean of those arms at the same seeds; its mean difference over
  S seeds then has variance sigma²(1 + 1/k)/S. That takes its runs to vary as the arms do, and speaks of the seeds that
  were run. p-values are adjusted by Holm's method over the variants judged together; intervals are not. Where runs
  end at several points there is a verdict at the end and one at equal tokens, each adjusted by itself.
- Whether a variant's runs vary as the arms do is tested, by the F ratio of the variance of its differences over seeds
  to sigma²(1 + 1/k). Where they vary more, the interval of their own spread is said as well, and a variant is only
  called better or worse if that interval excludes zero too.
- Where the verdict and the difference to {BASELINE} disagree, the verdict uses more runs and the
  difference assumes less.
- Training is not quite equal. A difference has to be beyond noise without what that may be worth, as follows. HellaSwag
  items and paired windows compare the runs as they ended, with no such allowance.
- At the end of a time limit: counts of steps are timed before the first run, so that a variant may train for a little
  less or more time than the equivalent arms at its seeds, and end at other tokens. Those that had less would have
  gained the logarithm of the ratio of the times, times the fall of their own loss for each unit of the logarithm of
  tokens, and twice that is allowed for: the most from any evaluation between half and nine tenths of a run to its
  end. Seconds stand for training as far as the machine held its speed. There is no verdict under {100 * EARLY:.0f} % of
  the time, between different cards, and where one of those that had less has no evaluation in its first half or its
  loss rose again (but for times that agree within {100 * (1 - EQUAL):.1f} %).
- At equal tokens: a run of fewer steps is further on in its schedule there, and may have had lower learning rates. That
  puts it ahead late in a long training and behind in a short one, and no record tells by how much: there is a
  verdict at equal tokens between schedules of one length, as CONFIG_BUDGET_EQUAL_TOKENS=y gives them.
- The effect that a number of seeds can see has 80 % power in a two-sided t test at 5 %, by the noncentral t
  distribution (AS 243), the measured noise floor taken for the true one; where a variant varies more than the arms, its
  own spread has to show the effect as well. Hours are those of the runs' own clocks, all variants.
- B, RAEARLY, RALATE and RAALL swap no half of the layers, the first, the second or both: a 2 x 2 design. A half swap
  changes the loss by what a half does alone and by what only both do together, a full swap by what two halves do alone.
  The F ratio of the variances of the two within seeds is 1 if half-swapped arms vary as much as fully swapped ones.
- HellaSwag item by item: McNemar's exact test; with several seeds, the exact sign test of each item's net score.
- HellaSwag's standard error is that of the items; more seeds answer the same items and do not shrink it.
- "{CANNOT_TELL}" stands wherever an interval contains zero. It does not say that there is no difference."""
