//! Decodes PNG files.
#![no_main]

use chiasm_media::ImageFormat;

libfuzzer_sys::fuzz_target!(|data: &[u8]| chiasm_fuzz::decode(ImageFormat::Png, data));
