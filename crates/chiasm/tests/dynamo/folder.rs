//! Workers that name themselves by files of a folder.

use super::mocker::Mocker;
use super::{BLOCK, NAMESPACE, SOON, known_exactly, workers};
use crate::support::{Server, demo_model, scenario_run, wait_for};

#[tokio::test]
#[ignore = "needs Dynamo"]
async fn workers_of_a_folder_come_and_go() {
    let folder = tempfile::tempdir().expect("a folder");
    let (model, url) = (
        demo_model().display().to_string(),
        format!("dynamo+file://{}/{NAMESPACE}", folder.path().display()),
    );
    let server = Server::start(&[&model, "--served-model-name", "m", "--upstream", &url]);
    let first = Mocker::start_in_folder(folder.path(), NAMESPACE);
    let mut second = Mocker::start_in_folder(folder.path(), NAMESPACE);
    server.wait_ready(2, SOON).await;
    known_exactly(&server).await;
    scenario_run::play_all_with("text", &server, "m", BLOCK, 16).await;
    // One says goodbye and takes its files along, the other one leaves them behind.
    first.signal("TERM");
    wait_for("the first one's end", SOON, async || workers(&server).await.len() == 1).await;
    second.kill();
    wait_for("the second one's end", SOON, async || workers(&server).await.is_empty()).await;
    let _third = Mocker::start_in_folder(folder.path(), NAMESPACE);
    server.wait_ready(1, SOON).await;
}
