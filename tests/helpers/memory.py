"""How large the tensors of a computation become."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation's result had."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Strides of zero hold nothing: an expanded tensor counts for what it stores.
        sizes = [min(x.numel(), x.untyped_storage().nbytes() // x.element_size()) for x in tree_leaves(result)
                 if isinstance(x, Tensor)]  # fmt: skip
        self.numel = max([self.numel, *sizes])
        return result
