//! Tests that the `chiasm` commands in the documentation are valid.

use std::fs;
use std::path::Path;

use super::{Cli, Command};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
/// The pages outside `docs` that have commands.
const OTHER_PAGES: [&str; 3] = ["README.md", "AGENTS.md", "deploy/README.md"];
/// The name of the configuration file in commands. Its contents are in the page's YAML block.
const CONFIG: &str = "chiasm.yaml";

/// Returns the contents of a page's code blocks in this language.
fn blocks<'a>(page: &'a str, language: &str) -> impl Iterator<Item = &'a str> {
    let start = format!("```{language}");
    let blocks: Vec<_> = page.split(&start).skip(1).collect();
    blocks.into_iter().filter_map(|block| {
        let (rest_of_line, block) = block.split_once('\n')?;
        // `sh tried` marks blocks that another test runs.
        let is_language = rest_of_line.is_empty() || rest_of_line.starts_with(' ');
        block.split_once("```").filter(|_| is_language).map(|(block, _)| block)
    })
}

/// Returns the words of each `chiasm` command in a page.
fn commands(page: &str) -> Vec<Vec<String>> {
    let text: String = ["bash", "sh"].iter().flat_map(|shell| blocks(page, shell)).collect();
    let lines = text.replace("\\\n", " ");
    let parts = lines.lines().flat_map(|line| line.split("&&")).map(|part| {
        let command = part.split(" | ").next().unwrap_or_default();
        command.trim().trim_end_matches('&')
    });
    let commands = parts.filter(|part| !part.starts_with('#') && part.contains("chiasm"));
    let words = commands.filter_map(|command| shlex::split(command).map(without_shell));
    words.filter(|words| words.first().is_some_and(|word| word == "chiasm")).collect()
}

/// Removes variables in front of a command, its redirections, and marks of omitted words.
fn without_shell(words: Vec<String>) -> Vec<String> {
    let is_variable = |word: &String| {
        word.split_once('=')
            .is_some_and(|(name, _)| name.chars().all(|c| c.is_ascii_uppercase() || c == '_'))
    };
    let is_redirection = |word: &String| word.starts_with('>') || word.starts_with("2>");
    words
        .into_iter()
        .skip_while(is_variable)
        .take_while(|word| !is_redirection(word))
        .filter(|word| word != "…")
        .collect()
}

/// Parses a command. Its configuration file, if any, is at `config`.
fn parse(words: &[String], config: &Path) -> Result<Command, String> {
    let words = words.iter().map(|word| match word.as_str() {
        CONFIG => config.display().to_string(),
        word => word.to_owned(),
    });
    match Cli::parse_args(words) {
        Ok(cli) => Ok(cli.command),
        Err(error) => Err(error.to_string()),
    }
}

#[test]
fn commands_in_pages_are_valid() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join(CONFIG);
    let docs = fs::read_dir(format!("{ROOT}/docs")).unwrap().map(|entry| entry.unwrap().path());
    let pages = docs.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let others = OTHER_PAGES.map(|page| Path::new(ROOT).join(page));
    let mut count = 0;
    let mut faults = Vec::new();
    for path in pages.chain(others) {
        let page = fs::read_to_string(&path).unwrap();
        if let Some(example) = blocks(&page, "yaml").find(|block| block.contains(CONFIG)) {
            fs::write(&config, example).unwrap();
        }
        for words in commands(&page) {
            count += 1;
            if let Err(error) = parse(&words, &config) {
                faults.push(format!("{}: {}: {error}", path.display(), words.join(" ")));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(count >= 60, "only {count} commands were found");
}

#[test]
fn roles_page_has_trial_and_network_commands() {
    let page = fs::read_to_string(format!("{ROOT}/docs/roles.md")).unwrap();
    let mut shares = 0;
    let mut networks = 0;
    for words in commands(&page) {
        if let Command::Serve(args) | Command::Agent(args) = parse(&words, Path::new("")).unwrap() {
            shares += usize::from(args.engines.share_gpu);
            networks += usize::from(args.roles.roles_private_network.is_some());
        }
    }
    assert_eq!((shares, networks), (1, 2));
}
