"""Declares torchvision's nms and qnms, which its CUDA build cannot on a CPU build of torch."""

import importlib.abc
import sys


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares the operators at the first import of torchvision, so that nothing imports torch earlier."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is not None:  # then torchvision's own declarations load
                return
            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys._torchvision_schemas = library  # a library that is collected takes its operators along
        return


sys.meta_path.insert(0, _BeforeTorchvision())
