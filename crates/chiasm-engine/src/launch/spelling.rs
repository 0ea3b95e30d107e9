//! The spellings of a flag that vLLM's argparse accepts.

/// Returns `true` if an argument gives this flag, in full or abbreviated. A flag that ends in `*`
/// stands for all flags with that prefix.
pub(super) fn is_flag(arg: &str, flag: &str) -> bool {
    let name = name(arg);
    let may_be_short = name.starts_with("--") && name.len() > 3;
    is_flag_in_full(arg, flag)
        || may_be_short && flag.strip_suffix('*').unwrap_or(flag).starts_with(&name)
}

/// Returns `true` if an argument gives this flag in full.
pub(super) fn is_flag_in_full(arg: &str, flag: &str) -> bool {
    let name = name(arg);
    let matches = flag.strip_suffix('*').map_or(flag == name, |prefix| name.starts_with(prefix));
    matches && name.starts_with('-') && name.len() >= 2
}

/// Returns the name of the flag that an argument gives, in vLLM's spelling.
pub(super) fn name(arg: &str) -> String {
    arg.split(['=', '.']).next().unwrap_or_default().replace('_', "-")
}
