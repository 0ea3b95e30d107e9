//! Reads headers of all image formats.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    chiasm_fuzz::probe(data);
});
