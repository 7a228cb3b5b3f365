"""What every operator must refuse, from its contract: one wrong argument in a call that is right otherwise."""

from typing import Any, NamedTuple

from helpers.option_values import REFUSED, REFUSED_BY_TYPE, arguments_of
from helpers.samples import Problem, Sample, build, complete, contract_of, default_of, least_and_most, values_of

from xent_ops.ops.contract import NAMES


class Refusal(NamedTuple):
    """A call that is right but for one argument."""

    argument: str
    sample: Sample
    error: type[Exception]
    words: str


def refusals(name: str) -> list[Refusal]:
    """Each tensor with another dtype, shape or device, each option with what its rule refuses."""
    problem, contract = Problem(), contract_of(name)
    least, most = least_and_most(name, problem)
    found = []

    def add(argument: str, value: Any, error: type[Exception], words: str) -> None:
        args, options = list(call.args), dict(call.options)
        if argument in contract.keyword_only:
            options[argument] = value
        else:
            index = contract.positions[argument]
            args += [default_of(arguments_of(name)[one]) for one in contract.arguments[len(args) : index + 1]]
            args[index] = value
        found.append(Refusal(argument, Sample(name, tuple(args), options), error, words))

    checked = {one.name: one for one in (*contract.tensors, *contract.checked_last)}
    for argument, schema in arguments_of(name).items():
        values = values_of(name, argument, problem)
        with_it = complete(name, problem, {**least, argument: values[0]}) if values else None
        call = build(name, problem, (with_it or least) if argument in checked else most)
        if argument in checked and with_it is not None:
            tensor = contract.bind(call.args, call.options)[contract.positions[argument]]
            text = NAMES.get(argument, argument)
            if checked[argument].like != "any":
                add(argument, tensor.bool(), TypeError, f"^{text} has dtype torch.bool")
            if checked[argument] in contract.checked_last:
                add(argument, tensor[..., 1:], ValueError, rf"^{text} has shape \(.*\); expected \(")
            elif argument == contract.primary:
                if checked[argument].shape.behind:  # else any shape is that of rows
                    add(argument, tensor.new_zeros(()), ValueError, f"^{text} (has|have) no dimension")
            else:
                wrong = [
                    tensor.new_zeros((*tensor.shape, 2)),
                    *([tensor[..., :1]] if tensor.dim() and not checked[argument].gives else []),
                ]
                for one in wrong:
                    add(argument, one, ValueError, rf"^{text} has shape \(.*\)")
            if argument != contract.primary:
                add(argument, tensor.to("meta"), RuntimeError, rf"^{text} (is|are) on meta but .* on cpu")
        elif argument not in checked:
            for value in REFUSED.get(argument, REFUSED_BY_TYPE.get(str(schema.real_type), ())):
                add(argument, value, Exception, rf"\b{argument}\b")
    return found
