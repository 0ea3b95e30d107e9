//! Prometheus and promtool for tests, from a package that is unpacked into the cache.

use std::path::PathBuf;

use crate::debian;
use crate::error::Error;
use crate::keyed_dir::KeyedDir;
use crate::setup::Setup;

/// The environment variable that passes the folder of the programs to tests.
pub(crate) const VARIABLE: &str = "CHIASM_TEST_PROMETHEUS";

const PACKAGES: [&str; 1] = ["prometheus"];
/// The folder of the programs in the package.
const FOLDER: &str = "usr/bin";

/// Returns the folder with `prometheus` and `promtool`; unpacks the package if needed.
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
        |path, lock| debian::unpack(setup, &PACKAGES, path, lock),
    )?;
    Ok(dir.path().join(FOLDER))
}
