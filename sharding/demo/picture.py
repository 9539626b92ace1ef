"""The picture of one camera: the sides of the blocks of everything near as polygons, and what
hides what by a ray for each pixel.

What is drawn is where the calibration says, to the pixel. Pixel coordinates have the centre of the
top left pixel at (0, 0). Camera rays have 1 as third component, so that multiples of them are
depths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from fuelrail.pipeline.errors import needs
from fuelrail.pipeline.rigid import invert_rigid, move_points
from fuelrail.sharding.demo.rig import RigSensor, stream
from fuelrail.sharding.demo.shapes import (
    Block,
    Floats,
    Solid,
    list_details,
    list_sides,
    meet,
    side_colours,
)
from fuelrail.sharding.demo.street import (
    FACADE_M,
    KERB_M,
    LANE_WIDTH_M,
    Road,
    corners,
)

with needs("`fuelrail synth`"):
    import cv2

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import I32, U8
    from fuelrail.pipeline.sample.schema import F32, F64
    from fuelrail.sharding.demo.world import SynthClip, Weather

NEAR_M: Final = 0.3  # what is nearer to a camera is not drawn
_CUT_M: Final = NEAR_M / 2
_SILHOUETTE_PX: Final = 240  # width of the pictures in which silhouettes are counted
_BACKDROP_SCALE: Final = 8
_ROAD_M: Final = 200.0
_SHIFT: Final = 4  # binary digits of pixel coordinates after the point
_DETAIL_PX: Final = 40
_NOISE_ROOM: Final = 256
_MEADOW_RGB: Final = (87.0, 109.0, 54.0)
_PAVEMENT_RGB: Final = (136.0, 136.0, 136.0)
_ROAD_RGB: Final = (86.0, 86.0, 86.0)
_LINE_RGB: Final = (190.0, 190.0, 190.0)
_STRIPS: Final = (
    (KERB_M, FACADE_M - 1.2, _PAVEMENT_RGB),
    (1.2 - FACADE_M, -KERB_M, _PAVEMENT_RGB),
    (-KERB_M, KERB_M, _ROAD_RGB),
    (-0.14 - 0.06, -0.14 + 0.06, _LINE_RGB),
    (0.14 - 0.06, 0.14 + 0.06, _LINE_RGB),
    (-2 * LANE_WIDTH_M - 0.07, -2 * LANE_WIDTH_M + 0.07, _LINE_RGB),
    (2 * LANE_WIDTH_M - 0.07, 2 * LANE_WIDTH_M + 0.07, _LINE_RGB),
)
"""Low and high edge to the left of the centre line in metres, and colour."""


class Sight(NamedTuple):
    """A block that a camera may show, in a window of the image of H x W pixels."""

    block: Block
    window: tuple[slice, slice]
    depth: Floats  # (H, W) along the camera's axis, infinite where the pixel does not show it
    entries: Floats  # (3, H, W): the depths of the nearer sides across each axis of the unit box
    cam2unit: Floats  # camera to unit box, (4, 4)


def pixel_rays(intrinsics: F64, size: tuple[int, int]) -> F32:
    """Return the rays (3, height, width) of all pixels of an image of ``size`` (width, height)."""
    width, height = size
    u, v = np.meshgrid(np.arange(width), np.arange(height))
    rays = np.einsum(
        "ij,jrc->irc",
        np.linalg.inv(intrinsics),
        np.stack([u, v, np.ones_like(u)]),
    )
    return np.asarray(rays, np.float32)


def window_of(
    vertices: F64,
    intrinsics: F64,
    size: tuple[int, int],
) -> tuple[slice, slice]:
    """Return the rows and columns of an image of ``size`` (width, height) that can show a body.

    ``vertices`` (V, 3) are in camera axes.
    """
    if (vertices[:, 2] < NEAR_M).all():
        return slice(0, 0), slice(0, 0)
    margin_px = 0
    if (vertices[:, 2] < NEAR_M).any():
        # Only what is ahead of the camera shows: cut the body's hull off, well before the nearest
        # depth that is drawn.
        is_ahead = vertices[:, 2] >= _CUT_M
        ahead = vertices[is_ahead]
        behind = vertices[~is_ahead][:, None]
        depth_behind = behind[:, :, 2:]
        share = (_CUT_M - depth_behind) / (ahead[:, 2:] - depth_behind)
        crossings = behind + (ahead - behind) * share
        crossings = crossings.reshape(-1, 3)
        vertices = np.concatenate([ahead, crossings])
        margin_px = 2
    pixels = vertices @ intrinsics.T
    pixels = pixels[:, :2] / pixels[:, 2:]
    low = np.ceil(pixels.min(0)) - margin_px
    low = np.clip(low, 0, size).astype(int)
    high = np.floor(pixels.max(0)) + 1 + margin_px
    high = np.clip(high, 0, size).astype(int)
    rows = slice(low[1], high[1])
    columns = slice(low[0], high[0])
    return rows, columns


def in_view(solids: list[Solid], global2cam: F64, camera: RigSensor) -> list[Solid]:
    """Return the solids of which a part may be in the picture, by spheres around them."""
    if not solids:
        return []
    centres = np.array([solid.centre for solid in solids])
    sizes = [solid.size_lwh for solid in solids]
    reach = np.linalg.norm(sizes, axis=1) / 2.0
    x, _, z = move_points(centres, global2cam).T
    # Distance from the planes through the camera and the left and right edges of the picture.
    left = camera.intrinsics[0, 2] + 1.0
    right = camera.size[0] - camera.intrinsics[0, 2]
    focal = camera.intrinsics[0, 0]
    from_left = (x * focal + z * left) / math.hypot(focal, left)
    from_right = (z * right - x * focal) / math.hypot(focal, right)
    is_seen = z + reach > NEAR_M
    is_seen &= from_left > -reach
    is_seen &= from_right > -reach
    return [solids[place] for place in np.flatnonzero(is_seen).tolist()]


def sights(
    solid: Solid,
    global2cam: F64,
    intrinsics: F64,
    rays: Floats,
) -> Iterator[Sight]:
    """Yield what the pixels with these ``rays`` (3, H, W) show of an object, block by block."""
    unit2cam = global2cam @ solid.unit2global()
    cam2unit = np.linalg.inv(unit2cam)
    for block in solid.blocks:
        vertices = move_points(block.corners, unit2cam)
        size = rays.shape[:0:-1]
        rows, columns = window_of(vertices, intrinsics, size)
        if rows.stop > rows.start and columns.stop > columns.start:
            depth, entries = meet(block, cam2unit, rays[:, rows, columns])
            depth[depth < NEAR_M] = np.inf
            yield Sight(
                block=block,
                window=(rows, columns),
                depth=depth,
                entries=entries,
                cam2unit=cam2unit,
            )


def owners(
    camera: RigSensor,
    cam2global: F64,
    solids: list[Solid],
    width_px: int,
) -> tuple[I32, dict[int, int]]:
    """Return the actor that each pixel (H, W) shows, -1 for none, and the number of pixels of
    each actor if alone.
    """
    scale = width_px / camera.size[0]
    size = (width_px, round(camera.size[1] * scale))
    global2cam = invert_rigid(cam2global)
    move = (scale - 1.0) / 2.0
    shrink = np.array(
        [
            [scale, 0.0, move],
            [0.0, scale, move],
            [0.0, 0.0, 1.0],
        ]
    )
    intrinsics = shrink @ camera.intrinsics
    rays = pixel_rays(intrinsics, size)
    shape = size[::-1]
    actors = np.full(shape, -1, np.int32)
    nearest = np.full(shape, np.inf)
    alone = dict[int, int]()
    for solid in in_view(solids, global2cam, camera):
        silhouette = np.zeros(size[::-1], np.bool_)
        for sight in sights(solid, global2cam, intrinsics, rays):
            silhouette[sight.window] |= sight.depth < np.inf
            nearer = sight.depth < nearest[sight.window]
            nearest[sight.window][nearer] = sight.depth[nearer]
            actors[sight.window][nearer] = solid.actor
        if solid.actor >= 0 and silhouette.any():
            alone[solid.actor] = int(silhouette.sum())
    return actors, alone


def visible_shares(
    clip: SynthClip,
    solids: list[Solid],
    capture_us: int,
) -> dict[int, float]:
    """Return the share 0..1 of each actor's silhouettes that nothing nearer hides, for actors in
    at least one image.
    """
    alone_pixels = np.zeros(len(clip.actors) + 1)
    visible_pixels = np.zeros(len(clip.actors) + 1)
    for camera in clip.rig.cameras:
        cam2global = clip.ego2global(capture_us - camera.lead_us) @ camera.sensor2ego
        actors, alone = owners(camera, cam2global, solids, _SILHOUETTE_PX)
        counts = np.bincount(actors.ravel() + 1, minlength=len(visible_pixels))
        visible_pixels += counts
        for actor, pixels in alone.items():
            alone_pixels[actor + 1] += pixels
    return {
        actor - 1: float(visible_pixels[actor] / alone_pixels[actor])
        for actor in range(1, len(alone_pixels))
        if alone_pixels[actor]
    }


def render(
    clip: SynthClip,
    camera: RigSensor,
    solids: list[Solid],
    exposure_us: int,
) -> U8:
    """Return the picture (H, W, 3), RGB, taken at ``exposure_us``.

    Sides of blocks are filled as polygons, what may hide others after these. Texture is noise.
    """
    cam2global = clip.ego2global(exposure_us) @ camera.sensor2ego
    canvas = Canvas(camera, cam2global, clip.weather)
    canvas.paint_backdrop()
    canvas.paint_road(clip.road)
    solids = in_view(solids, canvas.global2cam, camera)
    order = painting_order(solids, cam2global[:2, 3])
    canvas.paint_solids([solids[place] for place in order])
    draw = stream("sensor", clip.name, camera.channel, exposure_us)
    return canvas.develop(draw)


def painting_order(solids: list[Solid], eye: F64) -> list[int]:
    """Return the order in which upright boxes are painted: what another may hide comes before it.

    Two boxes that do not touch are parted by the line of a side of one of them. The one on the
    eye's side of that line is never hidden by the other.
    """
    if not solids:
        return []
    centres = np.array([solid.centre[:2] for solid in solids])
    footprints = np.array([solid.size_lwh[:2] for solid in solids])
    lengths, widths = footprints.T
    yaws = np.array([solid.yaw_rad for solid in solids])
    outlines = corners(
        centres[:, 0],
        y=centres[:, 1],
        yaw_rad=yaws,
        length=lengths[:, None],
        width=widths[:, None],
    )
    cos = np.cos(yaws)
    sin = np.sin(yaws)
    turn = np.stack([cos, sin, -sin, cos], -1)
    turn = turn.reshape(-1, 2, 2)  # global to box axes
    halves = np.stack([lengths, widths], -1) / 2.0
    # Corners of each box j, and the eye, in the axes of each box i.
    offsets = outlines[None] - centres[:, None, None]
    in_box = np.einsum("iab,ijkb->ijka", turn, offsets)
    eyes = np.einsum("iab,ib->ia", turn, eye - centres)
    low = in_box.min(axis=2)
    high = in_box.max(axis=2)
    limit = halves[:, None]
    is_eye_high = (eyes > halves)[:, None]
    is_eye_low = (eyes < -halves)[:, None]
    is_high = low >= limit
    is_low = high <= -limit
    # j is on the eye's side of i, or beyond a side of i that the eye is not beyond.
    is_in_front = (is_high & is_eye_high) | (is_low & is_eye_low)
    is_behind = (is_high & ~is_eye_high) | (is_low & ~is_eye_low)
    in_front = is_in_front.any(axis=2)
    behind = is_behind.any(axis=2)
    directions = (centres - eye).T
    distances = np.hypot(*directions)
    bearings = np.arctan2(*directions)
    radii = np.hypot(lengths, widths) / 2.0
    reach = np.arcsin(np.minimum(radii / distances, 1.0))
    difference = bearings[:, None] - bearings
    turns = np.exp(1j * difference)
    apart = np.abs(np.angle(turns))
    is_before = (in_front | behind.T) & ~(in_front.T | behind)
    is_before &= apart < reach[:, None] + reach
    np.fill_diagonal(is_before, False)
    waits = is_before.sum(axis=0)
    order = []
    is_open = np.ones(len(solids), bool)
    for _ in solids:
        ready = is_open & (waits == waits[is_open].min())
        candidates = np.where(ready, distances, -1.0)
        place = int(np.argmax(candidates))
        order.append(place)
        is_open[place] = False
        waits = waits - is_before[place]
    return order


class Canvas:
    """A picture that is being painted."""

    def __init__(
        self,
        camera: RigSensor,
        cam2global: F64,
        weather: Weather,
    ) -> None:
        self.camera = camera
        self.weather = weather
        self.cam2global = cam2global
        self.global2cam = invert_rigid(cam2global)
        width, height = camera.size
        self.image = np.empty((height, width, 3), np.uint8)
        self.haze = np.array(weather.haze_rgb, np.float64)

    def paint_backdrop(self) -> None:
        """Paint the sky and a meadow, from a smaller picture: they have no edges."""
        width, height = self.camera.size
        size = (
            max(width // _BACKDROP_SCALE, 2),
            max(height // _BACKDROP_SCALE, 2),
        )
        shrink = np.diag([size[0] / width, size[1] / height, 1.0])
        rays = pixel_rays(shrink @ self.camera.intrinsics, size)
        turn = self.cam2global[:3, :3].astype(np.float32)
        toward = np.einsum("ij,jrc->irc", turn, rays)
        level = np.hypot(toward[0], toward[1])
        up = np.clip(toward[2] / level, 0.0, 3.0)
        zenith = np.array(self.weather.zenith_rgb)
        share = 1.0 - np.exp(-2.6 * up)
        image = self.haze + (zenith - self.haze) * share[..., None]
        is_ground = toward[2] < -0.002
        height_m = np.float32(-self.cam2global[2, 3])
        depths = height_m / toward[2][is_ground]
        image[is_ground] = self._add_haze(np.array(_MEADOW_RGB), depths)
        cv2.resize(image.astype(np.uint8), self.camera.size, self.image)

    def paint_road(self, road: Road) -> None:
        """Paint pavements, the road and its lines, in pieces along the road."""
        offset = self.cam2global[:2, 3] - (road.x, road.y)
        x, y = offset.astype(np.float32)[:, None]
        along_ego = float(road.locate(x, y)[0][0])
        curvature = max(abs(road.curvature_per_m), 1e-3)
        reach = min(_ROAD_M, 1.4 / curvature)
        near = np.arange(0.0, 12.0, 1.0)
        far = np.geomspace(12.0, reach, 30)
        ahead = np.concatenate([near, far])
        behind = -ahead[:0:-1]
        along = along_ego + np.concatenate([behind, ahead])
        first_dash = math.floor((along_ego - reach) / 9.0)
        end_dash = math.ceil((along_ego + reach) / 9.0)
        starts = np.arange(first_dash, end_dash) * 9.0
        dashes = np.stack([starts + 2.9, starts + 6.1], -1)
        pieces = np.stack([along[:-1], along[1:]], -1)
        spans = self._centre_line(road, pieces)
        for low, high, rgb in _STRIPS:
            self._paint_strip(*spans, low, high, rgb)
        dash_spans = self._centre_line(road, dashes)
        for side in (-1, 1):
            middle = side * LANE_WIDTH_M
            self._paint_strip(*dash_spans, middle - 0.07, middle + 0.07, _LINE_RGB)

    def _centre_line(self, road: Road, along: F64) -> tuple[Floats, Floats]:
        """Return places of the road's centre line, and its left there, (P, 2, 3) in camera axes."""
        listed = along.ravel().tolist()
        centres = np.array([(*road.point(place, 0.0), 0.0) for place in listed])
        headings = road.heading_rad + road.curvature_per_m * along.ravel()
        level = np.zeros_like(headings)
        left = np.stack([-np.sin(headings), np.cos(headings), level], -1)
        turn = self.global2cam[:3, :3].T
        centres = centres @ turn + self.global2cam[:3, 3]
        left = left @ turn
        return centres.reshape(-1, 2, 3), left.reshape(-1, 2, 3)

    def _paint_strip(
        self,
        centres: Floats,
        left: Floats,
        low: float,
        high: float,
        rgb: tuple[float, float, float],
    ) -> None:
        """Paint pieces of a strip of the ground from ``low`` to ``high`` metres left of the middle.

        ``centres`` and ``left``: see :meth:`_centre_line`.
        """
        low_edge = centres + low * left
        high_edge = centres + high * left
        quads = np.concatenate([low_edge, high_edge[:, ::-1]], axis=1)
        is_ahead = (quads[:, :, 2] > NEAR_M).any(axis=1)
        quads = quads[is_ahead]
        depths = quads[:, :, 2].clip(NEAR_M).mean(axis=1)
        colours = self._add_haze(np.array(rgb), depths)
        for _ in self._fill(quads, colours):
            pass

    def paint_solids(self, solids: list[Solid]) -> None:
        """Paint the sides of solids that face the camera, in the order of the solids."""
        if not solids:
            return
        tables = [list_sides(solid.shape) for solid in solids]
        counts = [len(table.quads) for table in tables]
        owner = np.repeat(np.arange(len(solids)), counts)
        unit2global = np.stack([solid.unit2global() for solid in solids])
        unit2cam = self.global2cam @ unit2global
        turn = unit2cam[owner, :3, :3]
        move = unit2cam[owner, :3, 3]
        quads = np.concatenate([table.quads for table in tables])
        quads = np.einsum("nij,nkj->nki", turn, quads) + move[:, None]
        edges = quads[:, 1:3] - quads[:, :1]
        normals = np.linalg.cross(edges[:, 0], edges[:, 1])
        middles = quads.mean(axis=1)
        is_ahead = (quads[:, :, 2] > NEAR_M).any(axis=1)
        is_facing = (normals * middles).sum(axis=1) < 0.0
        is_seen = is_facing & is_ahead
        block_middles = np.concatenate([table.block_middles for table in tables])
        block_middles = np.einsum("nij,nj->ni", turn, block_middles) + move
        blocks = np.concatenate([table.blocks for table in tables])
        block_depths = np.linalg.norm(block_middles, axis=1)
        order = np.lexsort((blocks, -block_depths, owner))
        colours_by_solid = map(side_colours, solids, tables)
        light = np.concatenate(list(colours_by_solid))
        depths = np.linalg.norm(middles, axis=1)
        colours = self._add_haze(light, depths)
        starts = np.concatenate([[0], np.cumsum(counts)])
        order = order[is_seen[order]]
        for number, width_px in self._fill(quads[order], colours[order]):
            if width_px < _DETAIL_PX:
                continue
            place = int(order[number])
            solid_number = int(owner[place])
            side = place - int(starts[solid_number])
            details = list_details(solids[solid_number], side)
            if details is None:
                continue
            corners = details.quads @ turn[place].T + move[place]
            is_ahead = (corners[:, :, 2] > NEAR_M).all(axis=1)
            if is_ahead.any():
                depth = depths[place : place + 1]
                colour = self._add_haze(details.rgb, depth)[0]
                pixels = self._project(corners[is_ahead])
                fixed = _to_fixed_point(pixels)
                cv2.fillPoly(
                    self.image,
                    list(fixed),
                    color=colour.tolist(),
                    lineType=cv2.LINE_AA,
                    shift=_SHIFT,
                )

    def _fill(self, quads: Floats, colours: Floats) -> Iterator[tuple[int, float]]:
        """Fill polygons (N, 4, 3) of camera axes, one after the other.

        After each that is in the picture yields its number and its width or height in pixels.
        """
        is_cut = np.asarray((quads[:, :, 2] < NEAR_M).any(axis=1))
        whole_quads = np.where(is_cut[:, None, None], 1.0, quads)
        pixels = self._project(whole_quads)
        low = pixels.min(axis=1)
        high = pixels.max(axis=1)
        is_inside = (high > 0.0).all(axis=1)
        is_inside &= (low < self.camera.size).all(axis=1)
        fixed = _to_fixed_point(pixels)
        widths = (high - low).max(axis=1).tolist()
        listed = colours.tolist()
        for number in np.flatnonzero(is_inside | is_cut).tolist():
            polygon = fixed[number]
            if is_cut[number]:
                # Leave off what is nearer than `NEAR_M`.
                corners = []
                quad = quads[number]
                next_corners = np.roll(quad, -1, axis=0)
                for start, end in zip(quad, next_corners, strict=True):
                    is_ahead = start[2] >= NEAR_M
                    if is_ahead:
                        corners.append(start)
                    if is_ahead != (end[2] >= NEAR_M):
                        edge = end - start
                        crossing = start + edge * (NEAR_M - start[2]) / edge[2]
                        corners.append(crossing)
                outline = self._project(np.array(corners))
                size_px = np.ptp(outline, axis=0)
                widths[number] = float(size_px.max())
                polygon = _to_fixed_point(outline)
            cv2.fillConvexPoly(
                self.image,
                polygon,
                color=listed[number],
                lineType=cv2.LINE_AA,
                shift=_SHIFT,
            )
            yield number, widths[number]

    def _project(self, places: Floats) -> Floats:
        """Return pixels (..., 2) of places (..., 3) in front of the camera."""
        focal = self.camera.intrinsics.diagonal()[:2]
        centre = self.camera.intrinsics[:2, 2]
        pixels = places[..., :2] / places[..., 2:] * focal + centre
        return np.asarray(pixels, np.float64)

    def _add_haze(self, rgb: Floats, depths: Floats) -> Floats:
        """Return colours (N, 3), given in full light, as they are seen at these depths (N,)."""
        transmittance = np.exp(-depths / self.weather.haze_m)
        contrast = rgb * self.weather.light - self.haze
        colours = self.haze + contrast * transmittance[:, None]
        return np.asarray(colours, np.float64)

    def develop(self, draw: np.random.Generator) -> U8:
        """Return the picture with texture and noise."""
        width, height = self.camera.size
        brighter, darker = _noise_tiles(width + _NOISE_ROOM, height + _NOISE_ROOM)
        top, left = draw.integers(0, _NOISE_ROOM, 2).tolist()
        window = slice(top, top + height), slice(left, left + width)
        cv2.add(self.image, brighter[window], self.image)
        cv2.subtract(self.image, darker[window], self.image)
        return self.image


def _to_fixed_point(pixels: Floats) -> I32:
    """Return pixel coordinates as OpenCV draws parts of pixels: with ``_SHIFT`` binary digits."""
    return np.rint(pixels * (1 << _SHIFT)).astype(np.int32)


@lru_cache(maxsize=2)
def _noise_tiles(width: int, height: int) -> tuple[U8, U8]:
    """Return what texture and noise add to a picture (height, width, 3), and what they take off.

    The texture is a tile of 512 x 512 pixels that has more of the coarse, of standard deviation 4;
    the noise is white, of standard deviation 2.1.
    """
    size = 512
    frequency = np.fft.fftfreq(size, 1 / size)
    white = stream("tile", "grain").standard_normal((size, size))
    radius = np.hypot(frequency[:, None], frequency)
    falloff = np.maximum(radius, 1.0) ** 0.9
    spectrum = np.fft.fft2(white) / falloff
    tile = np.fft.ifft2(spectrum).real
    contrast = (tile - tile.mean()) / tile.std()
    tile = contrast * 4.0
    repeats = (-(-height // size), -(-width // size))
    texture = np.tile(tile.astype(np.float32), repeats)
    draw = stream("tile", "sensor")
    noise = draw.standard_normal((height, width), dtype=np.float32) * 2.1
    levels = np.rint(texture[:height, :width] + noise).astype(np.int16)
    brighter = levels.clip(0, 255).astype(np.uint8)
    darker = (-levels).clip(0, 255).astype(np.uint8)
    brighter_rgb = cv2.merge([brighter] * 3)
    darker_rgb = cv2.merge([darker] * 3)
    return brighter_rgb, darker_rgb
