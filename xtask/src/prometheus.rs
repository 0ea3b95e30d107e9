//! Prometheus and its promtool for tests: their package unpacked into the cache.

use std::path::PathBuf;

use crate::debian;
use crate::error::Error;
use crate::keyed_dir::KeyedDir;
use crate::setup::Setup;

/// What tests are told of the programs' folder by.
pub(crate) const VARIABLE: &str = "CHIASM_TEST_PROMETHEUS";

const PACKAGES: [&str; 1] = ["prometheus"];
/// Where the programs are in the package.
const FOLDER: &str = "usr/bin";

/// The folder with `prometheus` and `promtool`. An error says why there is none.
pub(crate) fn ensure(setup: &Setup) -> Result<PathBuf, Error> {
    let dir = KeyedDir::new(&setup.workspace.cache, "prometheus", &[b"1"]);
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |path| {
            ["prometheus", "promtool"]
                .iter()
                .all(|program| path.join(FOLDER).join(program).is_file())
        },
        |path, held| debian::unpack(setup, &PACKAGES, path, held),
    )?;
    Ok(dir.path().join(FOLDER))
}
