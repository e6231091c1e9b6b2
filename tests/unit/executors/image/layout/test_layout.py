"""`plan_layout` and `flat_range_boxes` keep the layout contract."""

from autockpt.executors.image.layout.boxes import flat_range_boxes
from autockpt.executors.image.layout.plan import plan_layout
from tests.contracts.layout_contract import LayoutContract


class TestLayout(LayoutContract):
    """The one layout there is."""

    plan = staticmethod(plan_layout)
    boxes = staticmethod(flat_range_boxes)
