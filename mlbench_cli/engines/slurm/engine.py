"""The engine of a Slurm cluster: the shared folder is authoritative; the controller only explains missing files."""

import json
import time
from collections.abc import Sequence

from msgspec.structs import replace

from mlbench_cli.agent.channel import Channel, ChannelRequest
from mlbench_cli.engines.base import Submission
from mlbench_cli.engines.crashes import last_lines
from mlbench_cli.engines.machines.details import SlurmDetails
from mlbench_cli.engines.machines.engine import MachinesEngine
from mlbench_cli.engines.observe import Snapshot
from mlbench_cli.engines.placement import NodeShare, share_nodes
from mlbench_cli.engines.slurm import controller, diagnosis
from mlbench_cli.engines.slurm.controller import JobReport
from mlbench_cli.engines.slurm.script import CLEAN, job_comment, job_name, make_slurm_plan, render_script
from mlbench_cli.errors import RemoteError, UnreachableError, UsageError
from mlbench_cli.model.run import Ending, Finding, Observation, Run
from mlbench_cli.model.spec import RunSpec

PENDING_POLL = 5.0  # seconds between two squeues while the run's job waits
RUNNING_POLL = 30.0
MAX_POLL = 120.0  # after errors
FILE_SECONDS = 10.0  # time until files that a node wrote before its job ended are visible everywhere
VANISHED_SECONDS = 60.0
CONTROLLER_SILENT = "controller_silent"
LOG_LINES = 12  # of the batch script and of srun, as evidence
FOREIGN_ENDS = ("canceled_by_other", "node_lost")  # codes of findings that Slurm's reason replaces


class SlurmEngine(MachinesEngine):
    """Executes runs as batch jobs of the cluster that `details` describe."""

    extra_logs = ("batch.log", "step.log")  # of the batch script and of srun: they hold what --setup has printed

    def __init__(self, details: SlurmDetails) -> None:
        super().__init__(details)
        self._details = details
        self._channel = Channel(details.target)
        self._jobs: dict[str, JobReport] = {}
        self._next_squeue = 0.0
        self._pause = PENDING_POLL
        self._silence: str | None = None
        self._vanished: dict[str, float] = {}
        self._unexplained: dict[str, float] = {}

    def render(self, spec: RunSpec) -> Submission:
        """The batch script, and the plan of its agents."""
        script = render_script(spec, self._details, self._code_folder)
        job = {"kind": "SlurmJob", "name": spec.name, "script": script}
        return Submission(spec, (job, {**make_slurm_plan(spec, self._details)}))

    # --- submit -----------------------------------------------------------------------------------------------------

    def submit(self, run: Run, submission: Submission) -> None:
        """Submit the job exactly once, even if several clients call this or are killed."""
        folder, lock = self._run_place(run), f"{self._details.folder}/locks/{run.name}"
        self._install_code(self._channel)
        try:
            _, written = self._channel.call_in_sequence(
                [ChannelRequest("lock", {"path": lock}), self._claim_request(run)]
            )
            if not written["written"] and self._is_submitted(run):
                return
            script, plan = submission.documents
            files = [
                _put_file(f"{folder}/job.sh", str(script["script"]), 0o700),
                _put_file(f"{folder}/plan.json", json.dumps(plan, sort_keys=True)),
            ]
            number = None if written["written"] else self._find_job(run)
            self._note_job(run, number or self._sbatch(run, files, str(script["script"])))
        finally:
            self._channel.call("unlock", path=lock)

    def _is_submitted(self, run: Run) -> bool:
        """Whether the run has a job. Raises UsageError if another run has its name, or if it was canceled."""
        self._check_owner(self._channel, run)
        if self._job_id(run) is not None:
            return True
        if self.head(run).has("cancel"):
            raise UsageError(f'The run "{run.name}" was canceled before it started.')
        return False

    def resume(self, run: Run) -> None:
        """Submit the job if the client that was about to do so died."""
        if self._job_id(run) is None and self.head(run).read().exists:
            self.submit(run, self.render(run.spec))

    def _find_job(self, run: Run) -> str | None:
        """A job that a client has submitted without noting its number. Of several the first stays."""
        known = self._read_text(f"{self._run_place(run)}/started/job")
        if known is not None and known.isdigit():
            return known
        found = controller.find_jobs(self._channel, job_name(run.spec), job_comment(run.spec, run.id))
        for number in found[1:]:
            controller.cancel_job(self._channel, number)
        return found[0] if found else None

    def _sbatch(self, run: Run, files: Sequence[ChannelRequest], script: str) -> str:
        """Write the job's files and submit it, in one exchange; its number."""
        if self._details.find_partition() is None:  # else rendering has compared; the test makes Slurm start jobs later
            tested = controller.ask(self._channel, ["sbatch", "--test-only"], script)
            if tested.code != 0:
                raise controller.explain_refusal(tested)
        comment = f"--comment={job_comment(run.spec, run.id)}"
        words = [*CLEAN, "sbatch", "--parsable", comment]
        submission = ChannelRequest("run", {"argv": words, "timeout": controller.COMMAND_SECONDS, "stdin": script})
        document = self._channel.call_in_sequence([*files, submission], seconds=controller.COMMAND_SECONDS + 20)[-1]
        answer = controller.Answer(document["code"], document["out"], document["err"])
        number = controller.find_number(answer.out) if answer.code == 0 else None
        return number or self._find_submitted(run, answer)

    def _find_submitted(self, run: Run, answer: controller.Answer) -> str:
        """The job that sbatch may have submitted although it named none, or exited with an error. Raises the error that
        explains its answer if there is none."""
        refusal = controller.explain_refusal(answer)
        if isinstance(refusal, UnreachableError):  # a controller whose answer came too late may have taken the job
            refusal.hint = f"scontrol ping; then mlbench wait {run.name}   looks for the job, or submits it"
        try:
            number = self._find_job(run)
        except UnreachableError:
            number = None
            if answer.code != 0:
                raise refusal from None
        if number is not None:
            return number
        if answer.code != 0:
            raise refusal
        said = " ".join(f"{answer.out} {answer.err}".split())[:300] or "nothing"
        raise UnreachableError(
            f"sbatch exited with 0 but named no job, so the job may have been submitted. It said: {said}",
            hint=f"squeue --me -n {job_name(run.spec)}; mlbench wait {run.name}   looks for it again",
        )

    def _note_job(self, run: Run, number: str) -> None:
        note = json.dumps({"job": number, "submitted": time.time()}).encode()
        self._channel.call("put", note, path=f"{self._run_place(run)}/job.json")
        self._next_squeue = 0.0

    def _job_id(self, run: Run) -> str | None:
        text = self._read_text(f"{self._run_place(run)}/job.json")
        return None if text is None else str(json.loads(text)["job"])

    def _read_text(self, path: str) -> str | None:
        answer, data = self._channel.exchange("get", path=path)
        return None if answer["size"] is None else data.decode().strip()

    # --- look -------------------------------------------------------------------------------------------------------

    def _shares(self, spec: RunSpec) -> Sequence[NodeShare]:
        return share_nodes(spec)

    def _channels(self, run: Run | None = None) -> Sequence[Channel]:
        return [self._channel]

    def _judge(self, run: Run, snapshot: Snapshot, observation: Observation) -> Observation:
        """Slurm's state only explains what the files leave open."""
        number = self._job_id(run)
        if number is None:
            return self._without_job(run, snapshot, observation)
        if observation.ended is not None and not _needs_explanation(observation, snapshot):
            return observation
        job = self._find_report(number, snapshot, is_over=observation.ended is not None)
        if self._silence is not None and observation.ended is None:
            finding = Finding(CONTROLLER_SILENT, self._silence, hint="The run continues.", retryable=True)
            observation = replace(observation, findings=(*observation.findings, finding))
        if observation.ended is not None:
            since = self._unexplained.setdefault(run.id, time.monotonic())
            if job is None and self._silence is None and self._details.has_accounting:
                job = controller.ask_accounting(self._channel, number)
            if job is not None and job.state == "SUSPENDED":
                words = f"Slurm has suspended job {job.id}: its processes are stopped until Slurm resumes it."
                return replace(observation, ended=None, findings=(Finding("job_suspended", words, retryable=True),))
            may_come = job is not None and not job.has_ended
            if may_come and time.monotonic() - since < self._details.kill_wait + FILE_SECONDS:
                return replace(observation, ended=None)
            if (found := self._find_memory_kill(run, number)) is not None:
                return _explained(observation, Ending.FAILED, found)
            return _explain_loss(observation, job, snapshot)
        if job is None:
            return self._judge_vanished(run, number, snapshot, observation)
        return self._judge_running(run, job, snapshot, observation)

    def _find_memory_kill(self, run: Run, number: str) -> Finding | None:
        """The finding on a step that Slurm killed for its memory, from the step's log; the job's state may not show
        it."""
        text = self.head(run).read_end("step.log").decode("utf-8", "replace")
        return diagnosis.find_memory_kill(text, number)

    def _judge_running(self, run: Run, job: JobReport, snapshot: Snapshot, observation: Observation) -> Observation:
        if job.is_pending and not snapshot.is_begun:
            workers = tuple(replace(worker, reason=job.waits_for) for worker in observation.workers)
            found = (diagnosis.explain_pending(job),) if diagnosis.is_worth_telling(job) else ()
            return replace(observation, workers=workers, findings=(*observation.findings, *found))
        if not job.has_ended or (job.ended is not None and snapshot.time - job.ended < FILE_SECONDS):
            return observation
        if snapshot.shows_life:
            finding = Finding(
                "job_ended_ranks_run",
                f"Slurm's job {job.id} has ended ({job.state}), but some of its processes are still running.",
                hint="mlbench cancel NAME ends them.",
                retryable=True,
            )
            return replace(observation, findings=(*observation.findings, finding))
        if not snapshot.is_begun and (failed := self._read_text(f"{self._run_place(run)}/setup.failed")) is not None:
            return replace(
                observation,
                ended=Ending.NEVER_STARTED,
                findings=(*observation.findings, diagnosis.setup_failed(failed)),
            )
        ended, found_end = diagnosis.explain_end(job, is_begun=snapshot.is_begun, is_canceled=snapshot.is_canceled)
        if found_end is not None and not snapshot.is_begun:  # what starts containers has printed why, for instance
            text = "\n".join(self.head(run).read_end(name).decode("utf-8", "replace") for name in self.extra_logs)
            found_end = replace(found_end, evidence={**found_end.evidence, "log": last_lines(text, LOG_LINES)})
        more = (found_end,) if found_end is not None else ()
        return replace(observation, ended=ended, findings=(*observation.findings, *more))

    def _judge_vanished(self, run: Run, number: str, snapshot: Snapshot, observation: Observation) -> Observation:
        if self._silence is not None:
            return observation
        if self._details.has_accounting:
            report = controller.ask_accounting(self._channel, number)
            if report is not None and report.has_ended:
                return self._judge_running(run, report, snapshot, observation)
        since = self._vanished.setdefault(run.id, time.time())
        submitted = float(json.loads(self._read_text(f"{self._run_place(run)}/job.json") or "{}").get("submitted", 0))
        if not snapshot.shows_life and min(since, submitted) > snapshot.time - VANISHED_SECONDS:
            return observation
        ended, finding = diagnosis.forgotten(number, is_begun=snapshot.is_begun, shows_life=snapshot.shows_life)
        return replace(observation, ended=ended, findings=(*observation.findings, finding))

    def _without_job(self, run: Run, snapshot: Snapshot, observation: Observation) -> Observation:
        if observation.ended is not None:
            return observation
        if snapshot.is_canceled:
            return replace(observation, ended=Ending.CANCELED)
        if self._read_text(f"{self._run_place(run)}/started/job") is not None:
            return observation
        finding = Finding(
            "not_submitted",
            "The run has no job on the cluster: its client was stopped before it submitted one.",
            hint=f"mlbench wait {run.name}   submits it; mlbench delete {run.name}   forgets it",
            retryable=True,
        )
        return replace(observation, findings=(*observation.findings, finding))

    def _find_report(self, number: str, snapshot: Snapshot, *, is_over: bool) -> JobReport | None:
        """The job as the controller describes it, from one squeue for all runs, called as rarely as possible."""
        now = time.monotonic()
        wanted = is_over or not snapshot.shows_life
        if now >= self._next_squeue - (RUNNING_POLL - PENDING_POLL if wanted and self._silence is None else 0.0):
            try:
                self._jobs = controller.list_jobs(self._channel)
                self._silence, self._pause = None, RUNNING_POLL
            except (UnreachableError, RemoteError) as error:
                self._silence, self._pause = error.message, min(MAX_POLL, 2 * self._pause)
            self._next_squeue = time.monotonic() + self._pause
        return self._jobs.get(number)

    # --- end --------------------------------------------------------------------------------------------------------

    def _stop(self, run: Run) -> None:
        """Let agents end by themselves, if any; then scancel the rest."""
        number = self._job_id(run) or self._find_job(run)
        if number is None:
            return
        if self.head(run).read().is_begun:
            self._await_end(run)
        controller.cancel_job(self._channel, number)
        self._next_squeue = 0.0

    def delete(self, run: Run, *, force: bool = False) -> None:
        """Remove the run's folder on the cluster; with `force` the job is canceled first."""
        is_there = force and not self._is_taken(self._channel, run)
        if is_there and (number := self._job_id(run)) is not None:
            controller.cancel_job(self._channel, number)
        super().delete(run, force=force)


def _put_file(path: str, text: str, mode: int = 0o600) -> ChannelRequest:
    """A file that need not survive a crash of the login node, after which the run is lost or submitted again."""
    return ChannelRequest("put", {"path": path, "mode": mode, "durable": False}, text.encode())


def _explained(observation: Observation, ended: Ending, *reason: Finding) -> Observation:
    """The observation of a run that ended for a reason that Slurm gives, in place of what that looked like."""
    kept = tuple(item for item in observation.findings if item.code not in FOREIGN_ENDS)
    return replace(observation, ended=ended, findings=(*reason, *kept))


def _needs_explanation(observation: Observation, snapshot: Snapshot) -> bool:
    """Whether Slurm may know better why the run ended: its agents or ranks were stopped from outside."""
    if observation.ended is Ending.CANCELED:
        return not snapshot.is_canceled
    if observation.ended is Ending.FAILED and observation.first_failed is not None:
        return observation.workers[observation.first_failed].exit_code in (128 + 9, 128 + 15)
    return observation.ended is Ending.LOST


def _explain_loss(observation: Observation, job: JobReport | None, snapshot: Snapshot) -> Observation:
    """A run whose agents were stopped or lost, with Slurm's reason for it."""
    if job is None or not job.has_ended or job.state in ("COMPLETED", "FAILED"):
        return observation
    if job.state == "CANCELLED" and observation.ended is not Ending.CANCELED:
        return observation
    ended, finding = diagnosis.explain_end(job, is_begun=True, is_canceled=snapshot.is_canceled)
    return _explained(observation, ended, *([finding] if finding else []))
