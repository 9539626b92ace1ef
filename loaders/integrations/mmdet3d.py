"""A batch as mmdetection3d 1.x and BEVDet take it: `img_inputs`, data samples, boxes whose z is
their bottom's.

::

    training = {"shuffle": True, "drop_last": True, "seed": 7}

    # BEVFormer, StreamPETR
    loader = DataLoader("DATASET", 8, **training, transforms=Transforms(box_frame="lidar"))
    for batch in loader:
        data = mmdet3d_samples(batch, as_data_samples=True)
        losses = model(**data, mode="loss")

    loader = DataLoader("DATASET", 8, **training)  # BEVDet: its boxes are in ego
    for batch in loader:
        data = mmdet3d_samples(batch, box_frame="ego")
        imgs, sensor2ego, ego2global, intrinsics, post_rotations, post_translations, bda =
        img_inputs(batch)

Sources: mmdetection3d 1.4, ``structures/bbox_3d/base_box3d.py`` (rows and origin of boxes),
``datasets/transforms/transforms_3d.py`` (`ObjectRangeFilter`), `Pack3DDetInputs` (names); BEVDet,
``mmdet3d/datasets/pipelines/loading.py`` (`PrepareImageInputs`, `LoadAnnotationsBEVDepth`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.loaders.config import BoxFrame


class ImgInputs(NamedTuple):
    """BEVDet's ``img_inputs``, in its order; float32 but for the images.

    A point p of the stored image at depth d is, in the augmented ego frame of the sample,
    ``bda @ (sensor2ego @ inverse(intrinsics) @ (d p))``. Exposure times are in ``sensor2ego``
    already, so ``ego2global`` is the same for all cameras, and the model's own compensation between
    cameras changes nothing.
    """

    imgs: torch.Tensor
    """[B, N, 3, H, W], as in the batch: uint8, or as `Normalize` made it."""
    sensor2ego: torch.Tensor
    """[B, N, 4, 4]: camera at its exposure to ego at the sample's time, not augmented."""
    ego2global: torch.Tensor
    """[B, N, 4, 4]: of the sample, not augmented; the identity where the dataset has no poses."""
    intrinsics: torch.Tensor
    """[B, N, 3, 3]: K of the stored image."""
    post_rotations: torch.Tensor
    """[B, N, 3, 3]: stored pixels to pixels of ``imgs``, with ``post_translations`` [B, N, 3]."""
    post_translations: torch.Tensor
    bda: torch.Tensor
    """[B, 3, 3]: ego to augmented ego."""


def img_inputs(batch: Mapping[str, Any]) -> ImgInputs:
    """Return BEVDet's ``img_inputs`` of a batch without temporal windows.

    Raises ConfigError for windows, for camera groups, and where the augmentation of the ego frame
    has a translation, which BEVDet's 3 x 3 ``bda`` cannot hold.
    """
    _require_one_stack(batch)
    ida = batch["ida_mat"]
    bda = batch["bda_mat"]
    if bda[:, :3, 3].any():
        raise ConfigError(
            "img_inputs cannot hold a translation of the ego frame: BEVDet's bda is a 3 x 3 "
            "matrix; leave translate_std_m out of BevAugment"
        )
    rotations = torch.zeros_like(ida[..., :3, :3])
    rotations[..., :2, :2] = ida[..., :2, :2]
    rotations[..., 2, 2] = 1.0
    translations = torch.zeros_like(ida[..., :3, 2])
    translations[..., :2] = ida[..., :2, 2]
    cam2keyego = batch["cam2keyego"]
    poses = torch.eye(4).to(bda).expand_as(bda)
    if "ego2global" in batch:
        poses = batch["ego2global"] @ bda.double()
    poses_of_cameras = poses.float()[:, None].expand_as(cam2keyego)
    undo_bda = torch.linalg.inv(bda)
    undo_ida = torch.linalg.inv(ida[..., :3, :3])
    return ImgInputs(
        imgs=batch["img"],
        sensor2ego=undo_bda[:, None] @ cam2keyego,
        ego2global=poses_of_cameras.contiguous(),
        intrinsics=undo_ida @ batch["intrinsics"],
        post_rotations=rotations,
        post_translations=translations,
        bda=bda[:, :3, :3].contiguous(),
    )


def mmdet3d_samples(
    batch: Mapping[str, Any],
    *,
    box_frame: BoxFrame = "lidar",
    point_range: Sequence[float] | None = None,
    as_data_samples: bool = False,
) -> dict[str, Any]:
    """Return ``{"inputs": {"img", "points"}, "data_samples": [...]}``, as mmdetection3d collates
    its samples.

    Boxes are float32 [M, 9] on their own device: x y z of the bottom's centre, length, width,
    height, yaw in -pi .. pi, velocity x y (0 where unknown). Left out are boxes outside the
    dataset's classes, without lidar or radar points (``use_valid_flag``), and, with ``point_range``
    [x, y, z, x, y, z], those whose centre is not above its rectangle (`ObjectRangeFilter`).

    ``box_frame`` must be the loader's. Points are given in this frame, and ``lidar2img`` leads from
    it to ``img``. A data sample is a dict with ``gt_bboxes_3d``, ``gt_labels_3d`` and ``metainfo``;
    with ``as_data_samples`` it is mmdetection3d's ``Det3DDataSample`` with
    ``LiDARInstance3DBoxes``, which needs mmdet3d.

    Raises ConfigError for batches with temporal windows, with camera groups or without labels.
    """
    _require_one_stack(batch)
    if "gt_boxes_3d" not in batch:
        raise ConfigError("mmdet3d_samples needs labels: the samples of this batch have no boxes")
    inputs: dict[str, Any] = {"img": list(batch["img"])}
    if "points" in batch:
        inputs["points"] = list(batch["points"])
        if box_frame == "ego":
            for number, lidar2ego in enumerate(batch["lidar2ego"]):
                points = inputs["points"][number]
                rotation = lidar2ego[:3, :3]
                xyz = points[:, :3] @ rotation.T + lidar2ego[:3, 3]
                inputs["points"][number] = torch.cat([xyz, points[:, 3:]], 1)
    samples = []
    for row in range(len(batch["sample_key"])):
        boxes = batch["gt_boxes_3d"][row]
        labels = batch["gt_labels_3d"][row]
        velocity = batch["gt_velocity"][row][:, :2]
        velocity = torch.nan_to_num(velocity, nan=0.0)
        keep = (labels >= 0) & batch["gt_valid"][row]
        if point_range is not None:
            x0, y0, _, x1, y1, _ = point_range
            x = boxes[:, 0]
            y = boxes[:, 1]
            keep &= (x > x0) & (x < x1)
            keep &= (y > y0) & (y < y1)
        bboxes = torch.cat([boxes, velocity], 1)[keep]
        bboxes[:, 2] -= bboxes[:, 5] / 2
        turns = torch.remainder(bboxes[:, 6] + torch.pi, 2 * torch.pi)
        bboxes[:, 6] = turns - torch.pi
        height, width = batch["img"].shape[-2:]
        intrinsics = batch["intrinsics"][row].cpu()
        cam2img = torch.eye(4).repeat(len(intrinsics), 1, 1)
        cam2img[:, :3, :3] = intrinsics
        lidar2img = batch[f"{box_frame}2img"][row].cpu()
        moved = batch["ida_mat"][row].cpu().clone()
        moved[:, :2, 3] = moved[:, :2, 2]  # there it acts on (u, v, 0, 1)
        moved[:, :2, 2] = 0.0
        lidar2cam = torch.linalg.inv(cam2img) @ lidar2img
        bda = batch["bda_mat"][row].cpu()
        samples.append(
            {
                "gt_bboxes_3d": bboxes,
                "gt_labels_3d": labels[keep],
                "metainfo": {
                    "sample_idx": batch["sample_key"][row],
                    "img_shape": (height, width),
                    "num_views": len(cam2img),
                    "cam2img": cam2img.numpy(),
                    "lidar2img": lidar2img.numpy(),
                    "lidar2cam": lidar2cam.numpy(),
                    "img_aug_matrix": moved.numpy(),
                    "lidar_aug_matrix": bda.numpy(),
                },
            }
        )
    if not as_data_samples:
        return {"inputs": inputs, "data_samples": samples}
    from mmdet3d.structures import Det3DDataSample, LiDARInstance3DBoxes
    from mmengine.structures import InstanceData

    data_samples = []
    for sample in samples:
        bboxes = sample["gt_bboxes_3d"]
        metainfo = {**sample["metainfo"], "box_type_3d": LiDARInstance3DBoxes}
        data_sample = Det3DDataSample(metainfo=metainfo)
        data_sample.gt_instances_3d = InstanceData(
            bboxes_3d=LiDARInstance3DBoxes(bboxes, box_dim=bboxes.shape[1]),
            labels_3d=sample["gt_labels_3d"],
        )
        data_samples.append(data_sample)
    return {"inputs": inputs, "data_samples": data_samples}


def _require_one_stack(batch: Mapping[str, Any]) -> None:
    if isinstance(batch["img"], dict):
        raise ConfigError(
            f"img is a dict of the camera groups {', '.join(batch['img'])}: the adapters "
            "for mmdetection3d take images of one size; leave camera_groups out of Transforms"
        )
    if batch["ida_mat"].ndim != 4:
        raise ConfigError(
            f"img has {batch['ida_mat'].ndim - 3} axes before the cameras: the adapters for "
            "mmdetection3d take batches without a temporal window; give them one frame at a time"
        )
    if "intrinsics" not in batch:
        raise ConfigError(
            "the adapters for mmdetection3d need calibrated cameras: the dataset knows no "
            "calibration"
        )
