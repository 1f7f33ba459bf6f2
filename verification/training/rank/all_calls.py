"""All calls beside the steps, by the names of `verification.training.call_names`."""

from __future__ import annotations

from verification.training.rank.apart_calls import APART_CALLS
from verification.training.rank.framework_calls import FRAMEWORK_CALLS
from verification.training.rank.gradient_calls import GRADIENT_CALLS
from verification.training.rank.handle_calls import HANDLE_CALLS
from verification.training.rank.loss_calls import LOSS_CALLS
from verification.training.rank.module_calls import MODULE_CALLS
from verification.training.rank.name_calls import NAME_CALLS
from verification.training.rank.option_calls import OPTION_CALLS
from verification.training.rank.other_calls import OtherCall
from verification.training.rank.rare_training_calls import RARE_CALLS
from verification.training.rank.recomputed_losses import RECOMPUTED_CALLS
from verification.training.rank.transformers_calls import TRANSFORMERS_CALLS
from verification.training.rank.wrong_arguments import ARGUMENT_CALLS
from verification.training.rank.wrong_frameworks import FRAMEWORK_MISTAKES
from verification.training.rank.wrong_modules import MODULE_MISTAKES
from verification.training.rank.wrong_orders import ORDER_MISTAKES
from verification.training.rank.wrong_training_calls import WRONG_CALLS

ALL_CALLS: dict[str, OtherCall] = (
    RARE_CALLS
    | HANDLE_CALLS
    | LOSS_CALLS
    | GRADIENT_CALLS
    | MODULE_CALLS
    | FRAMEWORK_CALLS
    | RECOMPUTED_CALLS
    | OPTION_CALLS
    | NAME_CALLS
    | APART_CALLS
    | WRONG_CALLS
    | ARGUMENT_CALLS
    | MODULE_MISTAKES
    | FRAMEWORK_MISTAKES
    | ORDER_MISTAKES
    | TRANSFORMERS_CALLS
)
