//! Tests that the commands in `docs/roles.md` are valid.

use std::fs;

use super::{Cli, Command};

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/roles.md");

/// Returns the commands in the page's shell blocks.
fn commands() -> Vec<String> {
    let page = fs::read_to_string(PAGE).expect("the page");
    let blocks = page
        .split("```sh\n")
        .skip(1)
        .filter_map(|block| block.split_once("```"))
        .map(|(block, _)| block);
    let lines = blocks.map(|block| block.replace("\\\n", "")).collect::<String>();
    lines.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect()
}

#[test]
fn commands_in_roles_page_are_valid() {
    let mut shares = 0;
    let mut networks = 0;
    let commands = commands();
    assert!(commands.len() >= 6, "{commands:?}");
    for text in commands {
        let words = shlex::split(&text).expect("words");
        match Cli::parse_args(words).unwrap_or_else(|error| panic!("{text}: {error}")).command {
            Command::Serve(args) | Command::Agent(args) => {
                shares += usize::from(args.engines.share_gpu);
                networks += usize::from(args.roles.roles_private_network.is_some());
            }
            Command::Simulate(_) => {}
            other => panic!("{text}: {other:?}"),
        }
    }
    assert_eq!((shares, networks), (1, 2));
}
