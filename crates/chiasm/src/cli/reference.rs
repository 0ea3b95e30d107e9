//! Generates `docs/flags.md` from the command line, and tests that the page is up to date.

use std::fmt::Write;
use std::{env, fs};

use clap::{Arg, ArgAction, Command};

use super::Cli;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/flags.md");
/// The variable that makes the test write the page if it is 1.
const WRITE_VARIABLE: &str = "CHIASM_WRITE_DOCS";
/// The command that writes the page.
const WRITE_COMMAND: &str = "CHIASM_WRITE_DOCS=1 cargo test -p chiasm --lib reference";

const INTRODUCTION: &str = "# Flags

*Reference.* Every flag, its environment variable and its default, for operators.

All flags of all commands, as `chiasm COMMAND --help` shows them, or `--help-all` for `serve` and
`agent`. [serve.md](serve.md) explains those of `serve`; [from-vllm.md](from-vllm.md) compares them
with vLLM's. A flag overrides its environment variable, and the variable overrides the default.
Arguments of `serve` and `agent` after `--` are passed to vLLM.

This page is generated from the command line; a test keeps both equal.
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
    let aliases = arg.get_visible_aliases().unwrap_or_default();
    let names: Vec<String> = match (arg.get_long(), value) {
        (None, value) => vec![value.map_or(arg.get_id().as_str(), |value| value).to_owned()],
        (Some(long), value) => [long]
            .into_iter()
            .chain(aliases)
            .map(|name| match value {
                Some(value) => format!("--{name} {value}"),
                None => format!("--{name}"),
            })
            .collect(),
    };
    let names: Vec<String> = names.iter().map(|name| code(name)).collect();
    let variable = arg.get_env().map(|name| code(&name.to_string_lossy())).unwrap_or_default();
    let defaults: Vec<_> =
        arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    let default =
        if takes_value && !defaults.is_empty() { code(&defaults.join(",")) } else { String::new() };
    let mut help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let choices: Vec<String> =
        arg.get_possible_values().iter().map(|value| code(value.get_name())).collect();
    let shows_choices = takes_value && !arg.is_hide_possible_values_set();
    let choices = if shows_choices && !choices.is_empty() {
        format!(": {}", choices.join(", "))
    } else {
        String::new()
    };
    help = escaped(&help);
    let names = names.join(", ");
    let _ = writeln!(page, "| {names} | {variable} | {default} | {help}{choices} |");
}

fn code(text: &str) -> String {
    format!("`{}`", text.replace('|', "\\|"))
}

/// Escapes text for a cell of a Markdown table.
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
fn flags_page_matches_command_line() {
    let generated = page();
    if env::var_os(WRITE_VARIABLE).is_some_and(|value| value == "1") {
        fs::write(PAGE, &generated).expect("the page can be written");
    }
    let current = fs::read_to_string(PAGE).unwrap_or_default();
    let difference = generated
        .lines()
        .zip(current.lines().chain(std::iter::repeat("")))
        .find(|(generated, current)| generated != current);
    assert!(
        current == generated,
        "docs/flags.md differs from the command line at {difference:?}; \
         write it again with: {WRITE_COMMAND}"
    );
}

#[test]
fn markdown_of_table_cells_is_escaped() {
    assert_eq!(escaped("a|b [c]\n<d>"), "a\\|b \\[c\\] \\<d>");
    assert_eq!(code("FILE|TEMPLATE"), "`FILE\\|TEMPLATE`");
}
