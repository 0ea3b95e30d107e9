//! Reads the index of any video container and cuts frames out of it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    chiasm_fuzz::video(data);
});
