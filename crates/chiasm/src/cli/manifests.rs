//! Tests that the manifests of `deploy/kubernetes` fit this command line and each other: what no
//! schema can say. That they are valid by Kubernetes' schemas is tested by `python/manifests`.

use std::fs;
use std::path::Path;
use std::time::Duration;

use clap::CommandFactory;
use yaml_rust2::{Yaml, YamlLoader};

use super::{Cli, Command, ServeArgs, is_not_of_agents};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/kubernetes");
/// Variables of containers that no flag has: what a flag's value refers to, and those of the
/// Hugging Face hub.
const NO_FLAGS: [&str; 3] = ["POD_NAMESPACE", "HF_HOME", "HF_TOKEN"];

/// A DaemonSet or a Deployment, whose pods have one container.
struct Workload {
    manifest: Yaml,
}

impl Workload {
    fn agents() -> Self {
        Self { manifest: the_only("DaemonSet") }
    }

    fn frontends() -> Self {
        Self { manifest: the_only("Deployment") }
    }

    fn template(&self) -> &Yaml {
        &self.manifest["spec"]["template"]
    }

    fn pod(&self) -> &Yaml {
        &self.template()["spec"]
    }

    fn container(&self) -> &Yaml {
        let [container] = &items(&self.pod()["containers"])[..] else { panic!("one container") };
        container
    }

    /// What a command line in this container is parsed to, with the variables that Kubernetes puts
    /// into it and those of the container.
    fn parse(&self, words: &[&str]) -> Command {
        assert_eq!(words[0], "chiasm");
        let command = Cli::command();
        let subcommand = command.find_subcommand(words[1]).expect(words[1]);
        let flags = items(&self.container()["env"]).iter().filter_map(|variable| {
            let is_its = |arg: &&clap::Arg| {
                arg.get_env().is_some_and(|name| name == text(&variable["name"]))
            };
            let arg = subcommand.get_arguments().find(is_its)?;
            let is_hidden = words[1] == "agent" && is_not_of_agents(arg);
            let flag = arg.get_long().filter(|_| !is_hidden)?;
            Some(format!("--{flag}={}", variable["value"].as_str()?))
        });
        let words = words.iter().map(|word| word.replace("$(POD_NAMESPACE)", "default"));
        let mut words: Vec<String> = words.collect();
        // Before what comes after two dashes.
        words.splice(2..2, flags);
        assert!(!words.iter().any(|word| word.contains("$(")), "{words:?}");
        Cli::read(&words).unwrap_or_else(|error| panic!("{words:?}: {error}")).command
    }

    /// The command line of the container.
    fn args(&self) -> Box<ServeArgs> {
        let container = self.container();
        let words = items(&container["command"]).iter().chain(items(&container["args"]));
        match self.parse(&words.map(text).collect::<Vec<_>>()) {
            Command::Serve(args) | Command::Agent(args) => args,
            other => panic!("{other:?}"),
        }
    }

    /// What Kubernetes runs in the container, such as a probe.
    fn run_by(&self, action: &Yaml) -> Command {
        self.parse(&items(&action["exec"]["command"]).iter().map(text).collect::<Vec<_>>())
    }

    fn grace(&self) -> Duration {
        Duration::from_secs(
            self.pod()["terminationGracePeriodSeconds"].as_i64().unwrap().try_into().unwrap(),
        )
    }

    fn is_selected_by(&self, selector: &Yaml) -> bool {
        let labels = self.template()["metadata"]["labels"].as_hash().unwrap();
        let selector = selector.as_hash().unwrap();
        !selector.is_empty() && selector.iter().all(|(name, value)| labels.get(name) == Some(value))
    }
}

fn manifests() -> Vec<Yaml> {
    let files = fs::read_dir(FOLDER).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|extension| extension == "yaml"));
    files
        .flat_map(|path| YamlLoader::load_from_str(&fs::read_to_string(path).unwrap()).unwrap())
        .collect()
}

fn all(kind: &str) -> Vec<Yaml> {
    manifests().into_iter().filter(|manifest| text(&manifest["kind"]) == kind).collect()
}

fn the_only(kind: &str) -> Yaml {
    let [manifest] =
        <[Yaml; 1]>::try_from(all(kind)).unwrap_or_else(|all| panic!("{} of {kind}", all.len()));
    manifest
}

fn text(yaml: &Yaml) -> &str {
    yaml.as_str().unwrap_or_else(|| panic!("no text: {yaml:?}"))
}

fn items(yaml: &Yaml) -> &Vec<Yaml> {
    yaml.as_vec().unwrap_or_else(|| panic!("no list: {yaml:?}"))
}

#[test]
fn every_variable_is_one_that_its_command_reads() {
    for (workload, command) in [(Workload::agents(), "agent"), (Workload::frontends(), "serve")] {
        let cli = Cli::command();
        let known: Vec<_> = cli
            .find_subcommand(command)
            .unwrap()
            .get_arguments()
            .filter_map(|arg| arg.get_env())
            .collect();
        for variable in items(&workload.container()["env"]) {
            let name = text(&variable["name"]);
            assert!(NO_FLAGS.contains(&name) || known.iter().any(|known| *known == name), "{name}");
        }
        // Else Kubernetes sets variables of its own that have the same names.
        assert_eq!(workload.pod()["enableServiceLinks"].as_bool(), Some(false));
    }
}

#[test]
fn agents_and_frontends_serve_the_same_model_and_know_each_other() {
    let agents = Workload::agents();
    let (agent, frontend) = (agents.args(), Workload::frontends().args());
    assert_eq!(agent.model, frontend.model);
    assert_eq!(agent.engines.mm_processor_kwargs, frontend.engines.mm_processor_kwargs);
    assert!(
        agent.agents.tls.agent_certfile.is_some() && frontend.agents.tls.agent_certfile.is_some()
    );
    let gpus = &agents.container()["resources"]["limits"]["nvidia.com/gpu"];
    let wanted = agent.engines.engines.unwrap().roles().count() as u32
        * agent.engines.gpus_per_engine.unwrap();
    assert_eq!(gpus.as_i64(), Some(wanted.into()));
    // Whoever looks for agents finds those that nobody has admitted yet.
    let services = all("Service");
    let service = services
        .iter()
        .find(|service| agents.is_selected_by(&service["spec"]["selector"]))
        .unwrap();
    assert_eq!(service["spec"]["publishNotReadyAddresses"].as_bool(), Some(true));
    let port = &items(&service["spec"]["ports"])[0];
    let url = format!(
        "kubernetes://default/{}:{}",
        text(&service["metadata"]["name"]),
        text(&port["name"])
    );
    assert_eq!(frontend.agents.discovery.unwrap().to_string(), url);
}

#[test]
fn ports_are_those_that_are_listened_on_and_selectors_select() {
    let workloads = [Workload::agents(), Workload::frontends()];
    for workload in &workloads {
        let [port] = &items(&workload.container()["ports"])[..] else { panic!("one port") };
        assert_eq!(port["containerPort"].as_i64(), Some(workload.args().port.into()));
        assert!(workload.is_selected_by(&workload.manifest["spec"]["selector"]["matchLabels"]));
        let services = all("Service")
            .into_iter()
            .filter(|service| workload.is_selected_by(&service["spec"]["selector"]));
        let [service] = <[Yaml; 1]>::try_from(services.collect::<Vec<_>>()).unwrap();
        assert_eq!(items(&service["spec"]["ports"])[0]["targetPort"], port["name"]);
        for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
            let probe = &workload.container()[probe];
            assert!(probe["httpGet"].is_badvalue() || probe["httpGet"]["port"] == port["name"]);
        }
    }
    let [agents, frontends] = workloads;
    let policy = the_only("NetworkPolicy");
    let rule = &policy["spec"]["ingress"][0];
    assert!(agents.is_selected_by(&policy["spec"]["podSelector"]["matchLabels"]));
    assert!(frontends.is_selected_by(&rule["from"][0]["podSelector"]["matchLabels"]));
    assert_eq!(rule["ports"][0]["port"], agents.container()["ports"][0]["name"]);
    let budget = the_only("PodDisruptionBudget");
    assert!(frontends.is_selected_by(&budget["spec"]["selector"]["matchLabels"]));
}

#[test]
fn an_agent_is_probed_and_drained_where_it_listens_and_has_time_for_it() {
    let agents = Workload::agents();
    let (container, address) = (agents.container(), format!("127.0.0.1:{}", agents.args().port));
    for (probe, admitted) in
        [("startupProbe", false), ("livenessProbe", false), ("readinessProbe", true)]
    {
        let Command::Probe(args) = agents.run_by(&container[probe]) else { panic!("{probe}") };
        assert_eq!((args.agent, args.admitted), (address.clone(), admitted), "{probe}");
        assert!(args.tls.agent_tls_name.is_some());
    }
    let Command::Drain(drain) = agents.run_by(&container["lifecycle"]["preStop"]) else {
        panic!("drain")
    };
    assert_eq!((drain.agent, drain.resume), (address, false));
    assert!(agents.grace() > drain.wait + agents.args().limits.drain_timeout);
}

#[test]
fn a_frontend_has_time_to_finish_its_requests() {
    let frontends = Workload::frontends();
    let limits = frontends.args().limits;
    assert!(
        limits.drain_delay > Duration::ZERO
            && frontends.grace() > limits.drain_delay + limits.drain_timeout
    );
    assert_eq!(text(&frontends.container()["readinessProbe"]["httpGet"]["path"]), "/ready");
    assert_eq!(text(&frontends.container()["livenessProbe"]["httpGet"]["path"]), "/health");
}

#[test]
fn files_are_in_volumes_that_are_mounted() {
    for workload in [Workload::agents(), Workload::frontends()] {
        let has_volume = |mount: &Yaml| {
            items(&workload.pod()["volumes"]).iter().any(|volume| volume["name"] == mount["name"])
        };
        let mounts = items(&workload.container()["volumeMounts"]);
        assert!(mounts.iter().all(has_volume));
        let args = workload.args();
        let tls = args.agents.tls;
        for file in
            [args.agents.block_key_secret, tls.agent_certfile, tls.agent_keyfile, tls.agent_ca_file]
        {
            let folder = file.as_deref().and_then(Path::parent).unwrap();
            assert!(
                mounts.iter().any(|mount| Path::new(text(&mount["mountPath"])) == folder),
                "{}",
                folder.display()
            );
        }
    }
}

#[test]
fn frontends_alone_may_read_slices_and_no_more() {
    let (role, binding, account) =
        (the_only("Role"), the_only("RoleBinding"), the_only("ServiceAccount"));
    let [rule] = &items(&role["rules"])[..] else { panic!("one rule") };
    let of = |field: &str| items(&rule[field]).iter().map(text).collect::<Vec<_>>();
    assert_eq!([of("apiGroups"), of("resources")], [["discovery.k8s.io"], ["endpointslices"]]);
    assert_eq!(of("verbs"), ["list", "watch"]);
    assert_eq!(binding["roleRef"]["name"], role["metadata"]["name"]);
    assert_eq!(binding["subjects"][0]["name"], account["metadata"]["name"]);
    assert_eq!(Workload::frontends().pod()["serviceAccountName"], account["metadata"]["name"]);
    assert_eq!(Workload::agents().pod()["automountServiceAccountToken"].as_bool(), Some(false));
}
