//! The crate against its goldens: `tests/goldens`, written by the scripts in `python/goldens`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test crate, all of it")]

mod any_token;
mod engine_kwargs;
mod families;
mod family_plans;
mod fingerprints;
mod fixture_image;
mod golden;
mod hostile;
mod kwargs;
mod largest_items;
mod pixels;
