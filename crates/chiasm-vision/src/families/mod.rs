//! The image families: one module per family, with its settings and the arithmetic of its layouts.
//! `table` lists the families.

pub(crate) mod gemma3;
pub(crate) mod internvl;
pub(crate) mod internvl_chat;
pub(crate) mod llama4;
pub(crate) mod llava;
pub(crate) mod llava_next;
pub(crate) mod pixtral;
pub(crate) mod qwen_vl;
mod table;
mod tiled;
mod tower;

pub(crate) use table::{FamilyEntry, find};
