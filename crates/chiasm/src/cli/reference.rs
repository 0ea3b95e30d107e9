//! Writes `docs/flags.md` of the command line, and tests that it has been written since a flag was
//! changed.

use std::fmt::Write;
use std::{env, fs};

use clap::{Arg, ArgAction, Command};

use super::Cli;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/flags.md");
/// Set to 1, the test writes the page.
const WRITE: &str = "CHIASM_WRITE_DOCS";
const HOW: &str = "CHIASM_WRITE_DOCS=1 cargo test -p chiasm --lib reference";

const INTRODUCTION: &str = "# Flags

All flags of all commands, as `chiasm COMMAND --help` tells them. [serving.md](serving.md) explains those of `serve`,
[from-vllm.md](from-vllm.md) compares them with vLLM's. A flag wins over its variable of the environment, and the variable over the
default. What `serve` and `agent` are given after `--` goes to vLLM.

This page is made of the command line itself; a test compares them.
";

fn page() -> String {
    let mut command = Cli::definition();
    command.build();
    let mut page = INTRODUCTION.to_owned();
    for subcommand in
        command.get_subcommands().filter(|c| c.get_name() != "help" && !c.is_hide_set())
    {
        write_command(&mut page, subcommand);
    }
    page
}

fn write_command(page: &mut String, command: &Command) {
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let _ = write!(page, "\n## chiasm {}\n\n{}\n", command.get_name(), escaped(&about));
    let shown = |arg: &&Arg| !arg.is_hide_set() && arg.get_id() != "help";
    let mut headings: Vec<Option<&str>> = Vec::new();
    for arg in command.get_arguments().filter(shown) {
        if !headings.contains(&arg.get_help_heading()) {
            headings.push(arg.get_help_heading());
        }
    }
    for heading in headings {
        if let Some(heading) = heading {
            let _ = write!(page, "\n**{heading}**\n");
        }
        page.push_str("\n| flag | variable | default | meaning |\n|---|---|---|---|\n");
        for arg in
            command.get_arguments().filter(shown).filter(|arg| arg.get_help_heading() == heading)
        {
            write_flag(page, arg);
        }
    }
}

fn write_flag(page: &mut String, arg: &Arg) {
    let takes_value =
        !matches!(arg.get_action(), ArgAction::SetTrue | ArgAction::SetFalse | ArgAction::Count);
    let value = arg.get_value_names().filter(|_| takes_value).and_then(|names| names.first());
    let name = match (arg.get_long(), value) {
        (Some(long), Some(value)) => format!("--{long} {value}"),
        (Some(long), None) => format!("--{long}"),
        (None, _) => value.map(ToString::to_string).unwrap_or_else(|| arg.get_id().to_string()),
    };
    let variable = arg.get_env().map(|name| code(&name.to_string_lossy())).unwrap_or_default();
    let defaults: Vec<_> =
        arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    let default =
        if takes_value && !defaults.is_empty() { code(&defaults.join(",")) } else { String::new() };
    let mut help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let choices: Vec<String> =
        arg.get_possible_values().iter().map(|value| code(value.get_name())).collect();
    let mut choices = choices.join(", ");
    if takes_value && !choices.is_empty() {
        choices.insert_str(0, ": ");
    } else {
        choices.clear();
    }
    help = escaped(&help);
    let _ = writeln!(page, "| {} | {variable} | {default} | {help}{choices} |", code(&name));
}

fn code(text: &str) -> String {
    format!("`{}`", text.replace('|', "\\|"))
}

/// Text that Markdown leaves as it is, in a table's cell too.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for character in text.chars() {
        match character {
            '\n' => escaped.push(' '),
            '|' | '*' | '_' | '<' | '[' | ']' | '`' => escaped.extend(['\\', character]),
            _ => escaped.push(character),
        }
    }
    escaped
}

#[test]
fn the_page_of_flags_is_that_of_the_command_line() {
    let made = page();
    if env::var_os(WRITE).is_some_and(|value| value == "1") {
        fs::write(PAGE, &made).expect("the page can be written");
    }
    let kept = fs::read_to_string(PAGE).unwrap_or_default();
    let differs = made
        .lines()
        .zip(kept.lines().chain(std::iter::repeat("")))
        .find(|(made, kept)| made != kept);
    assert!(
        kept == made,
        "docs/flags.md is not what the command line says, from {differs:?} on; write it again by: {HOW}"
    );
}

#[test]
fn text_can_not_break_a_table() {
    assert_eq!(escaped("a|b [c]\n<d>"), "a\\|b \\[c\\] \\<d>");
    assert_eq!(code("FILE|TEMPLATE"), "`FILE\\|TEMPLATE`");
}
