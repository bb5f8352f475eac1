"""`make bench`: what each script needs is known."""

from tools import bench


def test_every_need_is_that_of_a_script_and_no_script_of_a_cluster_is_forgotten() -> None:
    folder = bench.ROOT / "benchmarks"
    assert bench.NEEDS.keys() <= {script.stem for script in bench.list_scripts(folder)}
    asking = {script.stem for script in bench.list_scripts(folder) if "KUBECONFIG=" in script.read_text()}
    assert asking == {name for name, need in bench.NEEDS.items() if need is bench.Need.CLUSTER}
