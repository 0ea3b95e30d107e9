//! Reads the length of any recording.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    chiasm_fuzz::recording(data);
});
