//! Writes `docs/models.md`: all multimodal architectures that the newest vLLM registers, and how
//! Chiasm serves them.
//!
//! The sources are vLLM's code, whose facts are kept beside the page as JSON, and this repository's
//! code and tests.
//!
//! | part | contents |
//! |---|---|
//! | `facts` | the architectures that vLLM registers |
//! | `ours` | the native architectures of Chiasm, and those compared in tests |
//! | `table` | the tables of both |

mod facts;
mod ours;
mod table;

use std::fs;

use crate::error::Error;
use crate::setup::Setup;
use crate::vllm_env;
use crate::vllm_overlay::{self, NEWEST};
use crate::workspace::Workspace;
use crate::{models, versions_page};
use facts::Facts;
use table::Table;

const PAGE: &str = "docs/models.md";

const COLUMNS: &str = include_str!("models_page/columns.md");
const HOW_TO_TRY: &str = include_str!("models_page/try.md");

/// Reads the facts from the newest vLLM and writes the page.
pub(crate) fn run(setup: &Setup) -> Result<(), Error> {
    let base = vllm_env::ensure(setup)?;
    let models = models::ensure(setup, &base)?;
    let env = vllm_overlay::ensure_version(setup, &base, NEWEST)?;
    let facts = Facts::from_vllm(setup, &env, &models)?;
    facts.write(&setup.workspace)?;
    let path = setup.workspace.root.join(PAGE);
    fs::write(&path, page(&setup.workspace, &facts)?).map_err(Error::io("write", path))?;
    // The versions page mentions this command among the steps for a new version.
    versions_page::write_page(&setup.workspace)
}

fn page(workspace: &Workspace, facts: &Facts) -> Result<String, Error> {
    let native = ours::native(workspace)?;
    let table = Table::new(facts, &native);
    let version = &facts.registered.vllm;
    let number = facts.registered.architectures.len();
    Ok(format!(
        "# Models\n\n*Reference.* Which models of vLLM Chiasm serves, and how it makes their \
         media, for operators.\n\nWritten by `cargo xtask models-page`, from what vLLM {version} \
         registers ([models.json](models.json)) and from this repository's\ncode and tests. \
         Text-only models are not listed.\n\nvLLM {version} registers {number} architectures \
         with media inputs. The table counts them by modality and by the\nprocessor of its \
         items.\n\n\
         {}\n{}\n{COLUMNS}\n{HOW_TO_TRY}\n## Architectures\n\n{}",
        table.counts(),
        table.refusals(),
        table.rows(),
    ))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn committed_page_matches_committed_facts() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let workspace = Workspace { root: root.to_owned(), cache: root.join("nowhere") };
        let facts = Facts::read(&workspace).unwrap();
        let again = "run `cargo xtask models-page`";
        assert_eq!(facts.registered.vllm, NEWEST, "{again}");
        assert!(
            facts
                .compared
                .keys()
                .all(|family| ours::COMPARED.iter().any(|(name, _)| name == family)),
            "{again}"
        );
        assert_eq!(facts.compared.len(), ours::COMPARED.len(), "{again}");
        assert_eq!(
            fs::read_to_string(root.join(PAGE)).unwrap(),
            page(&workspace, &facts).unwrap(),
            "{again}"
        );
    }

    #[test]
    fn native_or_compared_architectures_are_registered() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let workspace = Workspace { root: root.to_owned(), cache: root.join("nowhere") };
        let facts = Facts::read(&workspace).unwrap();
        let is_registered =
            |name: &str| facts.registered.architectures.iter().any(|it| it.name == name);
        for native in ours::native(&workspace).unwrap() {
            assert!(is_registered(&native.architecture), "{native:?}");
        }
        for (family, architecture) in &facts.compared {
            assert!(is_registered(architecture), "{family}: {architecture}");
        }
    }
}
