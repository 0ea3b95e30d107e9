//! One folder per image family: its settings and the arithmetic of its layout.

pub(crate) mod qwen_vl;
