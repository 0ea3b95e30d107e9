//! Decodes `data:` URLs.
#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| chiasm_fuzz::data_url(text));
