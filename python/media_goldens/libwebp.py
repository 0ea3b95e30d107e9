"""Bindings for the libwebp bundled with Pillow, for encoder settings that Pillow does not offer."""

import ctypes
from pathlib import Path

import numpy as np
import PIL

LIBRARIES = Path(PIL.__file__).resolve().parents[1] / "pillow.libs"
ENCODER_ABI_VERSION = 0x0210
FLOAT_SETTINGS = ("quality", "target_psnr")
# The fields of WebPConfig, in their order.
SETTINGS = (
    "lossless quality method image_hint target_size target_psnr segments sns_strength "
    "filter_strength filter_sharpness filter_type autofilter alpha_compression alpha_filtering "
    "alpha_quality passes show_compressed preprocessing partitions partition_limit "
    "emulate_jpeg_size thread_level low_memory near_lossless exact use_delta_palette "
    "use_sharp_yuv qmin qmax"
).split()
Writer = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_uint8), ctypes.c_size_t, ctypes.c_void_p
)


class Config(ctypes.Structure):
    """WebPConfig of webp/encode.h."""

    _fields_ = [
        (name, ctypes.c_float if name in FLOAT_SETTINGS else ctypes.c_int) for name in SETTINGS
    ]


class Picture(ctypes.Structure):
    """WebPPicture of webp/encode.h; the fields after the writer are not used here."""

    _fields_ = [
        ("use_argb", ctypes.c_int),
        ("colorspace", ctypes.c_int),
        ("width", ctypes.c_int),
        ("height", ctypes.c_int),
        ("planes", ctypes.c_void_p * 3),
        ("strides", ctypes.c_int * 2),
        ("alpha", ctypes.c_void_p),
        ("alpha_stride", ctypes.c_int),
        ("pad1", ctypes.c_uint32 * 2),
        ("argb", ctypes.c_void_p),
        ("argb_stride", ctypes.c_int),
        ("pad2", ctypes.c_uint32 * 3),
        ("writer", Writer),
        ("rest", ctypes.c_uint8 * 512),
    ]


def load():
    """Loads libsharpyuv and returns libwebp."""
    ctypes.CDLL(str(next(LIBRARIES.glob("libsharpyuv*"))), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(next(LIBRARIES.glob("libwebp-*"))))


def encode_webp(pixels, **settings):
    """Encodes an array of height x width x 3 or 4 bytes."""
    library = load()
    config = Config()
    picture = Picture()
    out = bytearray()
    quality = ctypes.c_float(settings.pop("quality", 75.0))
    assert library.WebPConfigInitInternal(ctypes.byref(config), 0, quality, ENCODER_ABI_VERSION)
    for name, value in settings.items():
        setattr(config, name, value)
    assert library.WebPValidateConfig(ctypes.byref(config)), settings
    assert library.WebPPictureInitInternal(ctypes.byref(picture), ENCODER_ABI_VERSION)
    height, width, channels = pixels.shape
    picture.use_argb = config.lossless
    picture.width = width
    picture.height = height
    pixels = np.ascontiguousarray(pixels)
    import_pixels = library.WebPPictureImportRGBA if channels == 4 else library.WebPPictureImportRGB
    assert import_pixels(
        ctypes.byref(picture), pixels.ctypes.data_as(ctypes.c_void_p), width * channels
    )

    def write(data, size, _):
        out.extend(ctypes.string_at(data, size))
        return 1

    picture.writer = Writer(write)
    encoded = library.WebPEncode(ctypes.byref(config), ctypes.byref(picture))
    library.WebPPictureFree(ctypes.byref(picture))
    assert encoded
    return bytes(out)
