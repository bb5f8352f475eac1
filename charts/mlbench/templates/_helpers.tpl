{{- define "mlbench.labels" -}}
app.kubernetes.io/name: mlbench
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "mlbench.selector" -}}
app.kubernetes.io/name: mlbench
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "mlbench.name" -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}-dashboard
{{- end }}

{{/* Whole CPUs of a Kubernetes quantity: 8 or 8000m. */}}
{{- define "mlbench.cpus" -}}
{{- $text := . | toString -}}
{{- if hasSuffix "m" $text -}}{{ divf (trimSuffix "m" $text | float64) 1000.0 }}{{- else -}}{{ $text }}{{- end -}}
{{- end }}
