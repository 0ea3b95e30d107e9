//! Workers that register as files in a folder.

use super::mocker::Mocker;
use super::{BLOCK, NAMESPACE, TIMEOUT, wait_known_blocks, workers};
use crate::support::{Server, demo_model, scenario_run, wait_for};

#[tokio::test]
#[ignore = "needs Dynamo"]
async fn workers_in_a_folder_are_discovered() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = demo_model().display().to_string();
    let url = format!("dynamo+file://{}/{NAMESPACE}", folder.path().display());
    let server = Server::start(&[&model, "--served-model-name", "m", "--upstream", &url]);
    let first = Mocker::start_in_folder(folder.path(), NAMESPACE);
    let mut second = Mocker::start_in_folder(folder.path(), NAMESPACE);
    server.wait_ready(2, TIMEOUT).await;
    wait_known_blocks(&server).await;
    scenario_run::play_all_with("text", &server, "m", BLOCK, 16).await;
    // The first worker shuts down and removes its files. The second one is killed and leaves them.
    first.signal("TERM");
    wait_for("one worker", TIMEOUT, async || workers(&server).await.len() == 1).await;
    second.kill();
    wait_for("no worker", TIMEOUT, async || workers(&server).await.is_empty()).await;
    let _third = Mocker::start_in_folder(folder.path(), NAMESPACE);
    server.wait_ready(1, TIMEOUT).await;
}
