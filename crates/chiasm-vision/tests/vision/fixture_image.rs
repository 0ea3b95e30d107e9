//! Deterministic RGB images from integer formulas, which are the same as in
//! `python/goldens/fixture_images.py`.

use std::iter;

use serde::Deserialize;

/// The description of one image.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct FixtureImage {
    pub(crate) kind: String,
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) seed: u32,
}

impl FixtureImage {
    /// Returns the packed RGB pixels.
    pub(crate) fn pixels(&self) -> Vec<u8> {
        let Self { width, height, .. } = *self;
        (0..height)
            .flat_map(|y| (0..width).zip(iter::repeat(y)))
            .flat_map(|(x, y)| (0..3).map(move |c| (x, y, c)))
            .map(|(x, y, c)| self.value(x, y, c))
            .collect()
    }

    fn value(&self, x: u32, y: u32, c: u32) -> u8 {
        let kind = match self.kind.as_str() {
            "mix" => ["noise", "gradient", "checker"][((x / 16 + y / 16) % 3) as usize],
            kind => kind,
        };
        match kind {
            "noise" => self.noise(x, y, c),
            "gradient" => {
                let along_x = x * 255 / (self.width - 1).max(1);
                let along_y = y * 255 / (self.height - 1).max(1);
                (along_x + along_y * (c + 1)) as u8
            }
            "checker" => ((x / (c + 3)) ^ (y / 5)) as u8 % 2 * 255,
            "flat" => self.seed as u8,
            kind => panic!("unknown kind of image: {kind}"),
        }
    }

    fn noise(&self, x: u32, y: u32, c: u32) -> u8 {
        let index = y.wrapping_mul(self.width).wrapping_add(x).wrapping_mul(3).wrapping_add(c);
        let mut h =
            index.wrapping_mul(0x9E37_79B1).wrapping_add(self.seed.wrapping_mul(0x85EB_CA77));
        h = (h ^ (h >> 15)).wrapping_mul(0x2C1B_3CCD);
        h = (h ^ (h >> 12)).wrapping_mul(0x297A_2D39);
        (h ^ (h >> 15)) as u8
    }
}
