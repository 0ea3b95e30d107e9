//! Compares the crate with its goldens in `tests/goldens`, which the scripts in `python/goldens`
//! write.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "test code")]

mod any_token;
mod engine_kwargs;
mod families;
mod family_plans;
mod fingerprints;
mod fixture_image;
mod golden;
mod golden_model;
mod hostile;
mod kwargs;
mod largest_items;
mod pixels;
mod video_goldens;
mod video_hostile;
mod video_pixels;
mod video_plans;
