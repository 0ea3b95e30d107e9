//! End-to-end tests: `chiasm` processes in front of simulated engines, and of real ones where
//! `cargo xtask test` provides them. One target compiles and links shared code once.
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test fails by panicking")]

mod agents;
mod anthropic;
mod clients;
mod crash;
mod demo_tools;
mod dynamo;
mod engine_kwargs;
mod groups;
mod heavy_mixes;
mod hostile;
mod hub;
mod identity;
mod keep_engines;
mod knowledge;
mod lora;
mod media_door;
mod media_soak;
mod memory;
mod operations;
mod page;
mod planned_videos;
mod real_processor;
mod real_sglang;
mod real_vllm;
mod recorded;
mod responses;
mod roles;
mod simulate;
mod simulated;
mod soak;
mod streams;
mod support;
mod tokens;
mod transfer;
mod upstream;
