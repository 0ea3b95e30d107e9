//! Size limits of images.

use crate::MediaError;

/// The limits for an image's file and header, enforced before memory for its pixels is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageLimits {
    /// The maximum encoded size in bytes. Default 64 MiB.
    pub max_bytes: u64,
    /// The maximum number of pixels: width times height. Default 178,956,970, which is the default
    /// of vLLM's `VLLM_MAX_IMAGE_PIXELS`, and Pillow's limit for decompression bombs.
    pub max_pixels: u64,
    /// The maximum number of pixels per row, and of rows. Default 65,535, the maximum of the JPEG
    /// and GIF formats. vLLM and Pillow have no such limit: the longer PNG and BMP images that they
    /// read need a higher one here.
    pub max_side: u32,
    /// The maximum ratio of the longer side to the shorter. Default 1000. vLLM and Pillow have no
    /// such limit, but few models accept more than 200.
    pub max_aspect_ratio: u32,
    /// The maximum number of scans of a JPEG file. Default 100, as in libtiff, GDAL and zune-jpeg.
    /// libjpeg writes 10, and Pillow has no such limit. A scan of a few bytes may pass over all
    /// pixels.
    pub max_scans: u32,
}

impl ImageLimits {
    /// Checks the size of an image in pixels against the limits.
    ///
    /// # Errors
    /// [`MediaError::TooManyPixels`], [`MediaError::TooLongSide`] and
    /// [`MediaError::AspectRatioTooLarge`].
    pub fn check(&self, width: u32, height: u32) -> Result<(), MediaError> {
        if width.max(height) > self.max_side {
            return Err(MediaError::TooLongSide { width, height, limit: self.max_side });
        }
        if u64::from(width) * u64::from(height) > self.max_pixels {
            return Err(MediaError::TooManyPixels { width, height, limit: self.max_pixels });
        }
        if u64::from(width.max(height))
            > u64::from(width.min(height)) * u64::from(self.max_aspect_ratio)
        {
            return Err(MediaError::AspectRatioTooLarge {
                width,
                height,
                limit: self.max_aspect_ratio,
            });
        }
        Ok(())
    }

    /// Checks the number of scans against the limit.
    pub(crate) fn check_scans(&self, scans: u32) -> Result<(), MediaError> {
        let limit = self.max_scans;
        if scans > limit { Err(MediaError::TooManyScans { scans, limit }) } else { Ok(()) }
    }
}

impl Default for ImageLimits {
    fn default() -> Self {
        Self {
            max_bytes: 64 << 20,
            max_pixels: 178_956_970,
            max_side: 65_535,
            max_aspect_ratio: 1000,
            max_scans: 100,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Fault;

    #[test]
    fn size_limits_are_exact() {
        let limits = ImageLimits {
            max_pixels: 200,
            max_side: 50,
            max_aspect_ratio: 20,
            ..ImageLimits::default()
        };
        assert_eq!(limits.check(50, 4), Ok(()));
        assert_eq!(limits.check(4, 50), Ok(()));
        assert_eq!(
            limits.check(51, 1),
            Err(MediaError::TooLongSide { width: 51, height: 1, limit: 50 })
        );
        assert_eq!(limits.check(1, 51).unwrap_err().fault(), Fault::TooLarge);
        assert_eq!(limits.check(50, 5).unwrap_err().fault(), Fault::TooLarge);
        assert_eq!(limits.check(2, 40), Ok(()));
        assert_eq!(
            limits.check(41, 2),
            Err(MediaError::AspectRatioTooLarge { width: 41, height: 2, limit: 20 })
        );
        assert_eq!(limits.check(u32::MAX, u32::MAX).unwrap_err().fault(), Fault::TooLarge);
    }

    #[test]
    fn default_pixel_limit_is_that_of_vllm() {
        let limits = ImageLimits::default();
        assert_eq!(limits.check(65_535, 2_730), Ok(()));
        assert!(limits.check(65_536, 100).is_err());
        assert_eq!(limits.check(13_377, 13_377), Ok(()));
        assert!(limits.check(13_377, 13_379).is_err());
    }
}
