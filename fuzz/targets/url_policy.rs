//! Checks URLs and redirects against the fetch policy.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: (&str, &[u8])| chiasm_fuzz::url_policy(input.0, input.1));
