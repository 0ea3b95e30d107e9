//! Recognising a flag of vLLM in the spellings that its argparse takes.

/// Whether this argument is a flag, in any spelling; one ending in `*` stands for all that start
/// so.
pub(super) fn is_flag(arg: &str, flag: &str) -> bool {
    let name = name(arg);
    let may_be_short = name.starts_with("--") && name.len() > 3;
    is_flag_in_full(arg, flag)
        || may_be_short && flag.strip_suffix('*').unwrap_or(flag).starts_with(&name)
}

/// The same for one that is not abbreviated.
pub(super) fn is_flag_in_full(arg: &str, flag: &str) -> bool {
    let name = name(arg);
    let is = flag.strip_suffix('*').map_or(flag == name, |start| name.starts_with(start));
    is && name.starts_with('-') && name.len() >= 2
}

/// The name of a flag, as vLLM writes it.
pub(super) fn name(arg: &str) -> String {
    arg.split(['=', '.']).next().unwrap_or_default().replace('_', "-")
}
