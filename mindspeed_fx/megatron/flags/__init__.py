"""Every flag of MindSpeed and MindSpeed-LLM: what it asks, and what becomes of it here.

``patch_parser()`` puts them into Megatron's parser; ``apply(args)`` does what they ask and refuses, in one error, those
that are not done here; ``backend_options(args)`` are the options of ``torch.compile`` that they ask for;
``explain(argv)`` says what becomes of each before a run. The rows are in the files beside this one, by subject.
"""

from mindspeed_fx.megatron.flags.account import Account, apply, backend_options
from mindspeed_fx.megatron.flags.flag import STATES, Flag, FlagError
from mindspeed_fx.megatron.flags.parallel import check_context_parallel
from mindspeed_fx.megatron.flags.parser import add_arguments, explain, load_arguments, patch_parser, unpatch_parser
from mindspeed_fx.megatron.flags.table import BY_KEY, SUBJECTS, TABLE

__all__ = [
    "BY_KEY",
    "STATES",
    "SUBJECTS",
    "TABLE",
    "Account",
    "Flag",
    "FlagError",
    "add_arguments",
    "apply",
    "backend_options",
    "check_context_parallel",
    "explain",
    "load_arguments",
    "patch_parser",
    "unpatch_parser",
]
